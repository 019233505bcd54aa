"""Images start from a base that is named by its digest, and from no other."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from e2e.images import base, recipe, tools
from e2e.images.errors import ImageError

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + 64 * "5"
BY_DIGEST = f"debian:12-slim@{DIGEST}"


class Buildah(tools.Buildah):
    """A local store that holds one base, or none."""

    def __init__(self, made: str | None) -> None:
        self.made = made

    def digest(self, image: str) -> str | None:
        return self.made


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can make a Debian."""
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def reference(root: Path, environ: Mapping[str, str] | None = None, tool: tools.Tool | None = None) -> str:
    return base.reference(tool or tools.Docker(), root, environ or {})


@pytest.mark.parametrize("name", ["debian:12-slim", "debian", "debian@sha256:55", f"debian @{DIGEST}"])
def test_a_base_that_is_given_without_its_digest_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match=r"QUIRE_BASE=debian.*has no digest.*write NAME@sha256:"):
        reference(tmp_path, {"QUIRE_BASE": name})


def test_a_base_that_is_given_by_its_digest_is_used(tmp_path: Path) -> None:
    assert reference(tmp_path, {"QUIRE_BASE": BY_DIGEST}) == BY_DIGEST


def test_without_a_recorded_digest_a_public_base_is_refused_with_the_command_that_records_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(ImageError, match=r"no digest of debian:12-slim is recorded: `make lock-base`"):
        reference(tmp_path)


def test_the_recorded_digest_is_used_and_a_recorded_tag_is_not(tmp_path: Path) -> None:
    lock = tmp_path / base.LOCK
    lock.parent.mkdir(parents=True)
    lock.write_text(f"{BY_DIGEST}\n")
    assert reference(tmp_path) == BY_DIGEST
    lock.write_text("debian:12-slim\n")
    with pytest.raises(ImageError, match=r"base\.txt has no digest"):
        reference(tmp_path)


def test_what_is_recorded_is_what_the_registry_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.registry, "digest", {base.PUBLIC_BASE: DIGEST}.__getitem__)
    (tmp_path / base.LOCK).parent.mkdir(parents=True)
    assert base.lock(tmp_path) == reference(tmp_path) == BY_DIGEST


@pytest.mark.usefixtures("as_root")
def test_a_debian_that_was_made_here_is_named_by_the_digest_of_its_contents(tmp_path: Path) -> None:
    made = reference(tmp_path, tool=Buildah(DIGEST))
    assert made == base.checked(f"localhost/quire-base@{DIGEST}", "")
    with pytest.raises(ImageError, match="has not been made yet"):
        reference(tmp_path, tool=Buildah(None))


def test_what_is_recorded_in_the_repository_has_a_digest() -> None:
    if (ROOT / base.LOCK).exists():
        base.checked((ROOT / base.LOCK).read_text().strip(), str(base.LOCK))


@pytest.mark.parametrize("image", recipe.IMAGES, ids=lambda image: image.name)
def test_no_build_starts_from_a_base_without_a_digest_whoever_starts_it(image: recipe.Recipe) -> None:
    text = (ROOT / image.dockerfile).read_text()
    assert re.findall(r"^ARG BASE(.*)$", text, re.MULTILINE) == 3 * [""], "a default would be a tag"
    first_step = text[text.index("RUN ") :]
    (refusal,) = re.findall(r"^    (case \"\$BASE\".* esac) \\$", first_step, re.MULTILINE)

    def build(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", refusal], env={"BASE": name}, capture_output=True, text=True)

    assert first_step.index(refusal) < first_step.index("apt-get")
    assert build(BY_DIGEST).returncode == 0
    refused = build("debian:12-slim")
    assert refused.returncode == 1 and "BASE=debian:12-slim has no digest" in refused.stderr


@pytest.mark.parametrize("image", recipe.IMAGES, ids=lambda image: image.name)
def test_an_image_says_which_base_it_was_made_from(image: recipe.Recipe) -> None:
    last_stage = (ROOT / image.dockerfile).read_text().rpartition("\nFROM ")[2]
    assert 'org.opencontainers.image.base.name="${BASE}"' in last_stage and "\nARG BASE\n" in last_stage
