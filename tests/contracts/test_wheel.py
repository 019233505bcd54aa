"""The wheel follows from the sources alone: anybody can build it again and compare it with theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Everything that the wheel is built from.
SOURCES = (".gitignore", "LICENSE", "README.md", "pyproject.toml", "kernels", "operator", "server")
# What a used checkout has besides: bytecode, and the CPU kernels that were compiled for its machine.
LITTER = (
    "server/quire_server/__pycache__/left.cpython-311.pyc",
    "kernels/quire_kernels/cpu/libquire_cpu.so",
    "kernels/quire_kernels/cpu/csrc/left.o",
)


def checkout(directory: Path, *, umask: int, mtime: int, is_used: bool) -> Path:
    """A copy of the sources as another machine could have it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    for name in SOURCES:
        source, target = ROOT / name, directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)
    for name in LITTER if is_used else ():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"left")
    for path in sorted(directory.rglob("*"), reverse=is_used):
        path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~umask)
        os.utime(path, (mtime, mtime))
    return directory


def build(sources: Path, environment: Mapping[str, str], umask: int) -> Path:
    """The wheel of these sources; the build backend is installed already, so no network is used."""
    environ = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    out = sources.parent / f"{sources.name}-dist"
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)],
        cwd=sources,
        env=environ | environment,
        umask=umask,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two builds: a fresh clone today, and a used checkout of somebody else, years ago, elsewhere."""
    fresh = checkout(tmp_path_factory.mktemp("a") / "fresh", umask=0o022, mtime=1_790_000_000, is_used=False)
    used = checkout(
        tmp_path_factory.mktemp("b") / "somewhere else", umask=0o077, mtime=1_000_000_000, is_used=True
    )
    return (
        build(fresh, {"TZ": "UTC", "PYTHONHASHSEED": "1", "LC_ALL": "C"}, 0o022),
        build(used, {"TZ": "Asia/Kolkata", "PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8"}, 0o077),
    )


def test_two_builds_in_other_folders_times_zones_and_umasks_are_equal_byte_for_byte(
    wheels: tuple[Path, Path],
) -> None:
    first, second = wheels
    assert first.name == second.name
    assert contents(first) == contents(second)
    assert first.read_bytes() == second.read_bytes()


def test_a_wheel_holds_the_packages_and_nothing_that_python_runs_at_its_start(
    wheels: tuple[Path, Path],
) -> None:
    packages = {path.name for shelf in ("kernels", "operator", "server") for path in (ROOT / shelf).iterdir()}
    top = {name.split("/")[0] for name in contents(wheels[0])}
    (metadata,) = (name for name in top if name.endswith(".dist-info"))
    assert top - {metadata} == {name for name in packages if name.startswith("quire_")}
    assert not [name for name in contents(wheels[0]) if name.endswith((".pth", ".pyc", ".so", ".o"))]


def contents(wheel: Path) -> dict[str, tuple[object, ...]]:
    """What is in a wheel, with what else an archive says of a file: time, rights, order."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            each.filename: (number, each.date_time, each.external_attr, each.CRC)
            for number, each in enumerate(archive.infolist())
        }
