"""Which images are removed from the node, and which stay."""

from e2e.cluster import images

LISTED = """\
REF TYPE DIGEST SIZE PLATFORMS LABELS
localhost/quire-pause:1 t sha256:pause 1 MiB linux/amd64 -
localhost:5000/quire-server:new t sha256:n 5 GiB linux/amd64 -
localhost:5000/quire-server@sha256:n t sha256:n 5 GiB linux/amd64 -
sha256:config-of-new t sha256:n 5 GiB linux/amd64 -
localhost:5000/quire-server:old t sha256:o 5 GiB linux/amd64 -
localhost:5000/quire-server@sha256:o t sha256:o 5 GiB linux/amd64 -
sha256:config-of-old t sha256:o 5 GiB linux/amd64 -
registry.example/theirs:1 t sha256:t 1 MiB linux/amd64 -
"""


def test_every_name_of_an_unused_image_goes_and_all_else_stays() -> None:
    gone = images.unused(LISTED, "localhost:5000", {"localhost:5000/quire-server:new"})
    assert gone == [
        "localhost:5000/quire-server:old",
        "localhost:5000/quire-server@sha256:o",
        "sha256:config-of-old",
    ]


def test_an_image_that_has_a_second_tag_in_use_stays() -> None:
    twice = LISTED + "localhost:5000/quire-server:same t sha256:n 5 GiB linux/amd64 -\n"
    gone = images.unused(twice, "localhost:5000", {"localhost:5000/quire-server:same"})
    assert "localhost:5000/quire-server:new" not in gone
