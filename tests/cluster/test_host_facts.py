"""What the kernel and `ip` say is read right."""

import tarfile
from io import BytesIO
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from e2e.cluster import cgroups, mounts, network, pause, programs, teardown
from e2e.cluster.errors import HostError
from e2e.cluster.layout import Checkout

HYBRID = """\
24 22 0:22 / /sys/fs/cgroup/cpu rw,relatime shared:1 - cgroup cgroup rw,cpu
25 22 0:23 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
26 22 0:24 / /tmp/with\\040space rw - tmpfs tmpfs rw
27 22 0:25 / /srv/gone//deleted rw - tmpfs tmpfs rw
"""


def test_a_hybrid_machine_shows_both_kinds_of_cgroups() -> None:
    found = cgroups.parse(HYBRID)
    assert found == cgroups.Hierarchies(
        v1=(Path("/sys/fs/cgroup/cpu"),), v2=(Path("/sys/fs/cgroup/unified"),)
    )


def test_mount_points_are_read_with_their_odd_characters() -> None:
    assert mounts.parse(HYBRID)[2:] == [Path("/tmp/with space"), Path("/srv/gone")]


def test_routes_of_every_shape_are_networks_and_the_default_is_none() -> None:
    text = '[{"dst": "default"}, {"dst": "192.0.2.0/24"}, {"dst": "192.0.2.255", "type": "broadcast"}]'
    assert network.parse_routes(text) == [IPv4Network("192.0.2.0/24"), IPv4Network("192.0.2.255/32")]
    assert network.parse_routes("") == []


def test_a_tree_goes_away_and_what_its_links_point_to_stays(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/weights").write_text("kept")
    (tmp_path / "pods").mkdir()
    (tmp_path / "pods/volume").symlink_to(tmp_path / "models")
    mounts.remove_tree(tmp_path / "pods")
    assert not (tmp_path / "pods").exists()
    assert (tmp_path / "models/weights").read_text() == "kept"


def test_only_shims_and_tools_of_our_own_are_found(tmp_path: Path) -> None:
    checkout = Checkout.at(Path("/srv/quire"))
    ours = f"/usr/bin/containerd-shim-runc-v2\0-id\0a\0-address\0{checkout.socket}\0"
    for pid, argv in {
        "11": ours,
        "12": ours.replace(str(checkout.socket), "/run/containerd/containerd.sock"),
        "13": f"vim\0{checkout.socket}\0",
        "14": "",
        "15": f"unshare\0--net={checkout.netns}\0true\0",
        "16": "unshare\0--net=/run/other/netns\0true\0",
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(argv.encode())
    (tmp_path / "self").mkdir()
    assert teardown.shims(checkout, tmp_path) == {11}
    assert teardown.tools(checkout, tmp_path) == {15}


def test_a_program_is_built_again_exactly_when_what_it_is_made_of_changes(tmp_path: Path) -> None:
    program = programs.Program("tool", module="module")
    source = tmp_path / "module" / "tool" / "main.go"
    source.parent.mkdir(parents=True)
    source.write_text("package main")
    before = programs.key(program, tmp_path, "go1.24.0")
    assert programs.key(program, tmp_path, "go1.24.0") == before
    assert programs.key(program, tmp_path, "go1.25.0") != before
    assert (
        programs.key(programs.Program("tool", module="module", ldflags=("-X a=b",)), tmp_path, "go1.24.0")
        != before
    )
    source.write_text("package main // changed")
    assert programs.key(program, tmp_path, "go1.24.0") != before


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.name)
def test_every_program_builds_with_the_oldest_go_that_is_promised(program: programs.Program) -> None:
    lines = (programs.SOURCES / program.module / "go.mod").read_text().splitlines()
    promised = ".".join(map(str, program.oldest_go))
    assert [line for line in lines if line.startswith(("go ", "toolchain "))] == [f"go {promised}.0"]


def test_what_make_up_compiles_builds_with_the_go_that_the_readme_asks_for() -> None:
    needed = [program for program in programs.PROGRAMS if program.name in programs.OF_UP]
    assert {program.oldest_go for program in needed} == {programs.OLDEST_GO}
    assert f"Go >= {'.'.join(map(str, programs.OLDEST_GO))}" in Path("README.md").read_text()


def test_a_go_that_is_too_old_for_a_program_is_refused_by_name() -> None:
    program = programs.Program("tool", module="module", oldest_go=(1, 26))
    programs.check_go(program, "go1.26.0", (1, 26))
    with pytest.raises(HostError, match="go1.25.9 is too old for tool: install Go >= 1.26"):
        programs.check_go(program, "go1.25.9", (1, 25))


def test_the_pause_image_holds_the_program_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "pause").write_bytes(b"program")
    archive = BytesIO(pause.archive(tmp_path / "pause", "localhost/pause:1"))
    with tarfile.open(fileobj=archive) as files:
        manifest = files.extractfile("manifest.json")
        assert manifest is not None
        assert b'"localhost/pause:1"' in manifest.read()
