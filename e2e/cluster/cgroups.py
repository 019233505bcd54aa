"""The cgroup under which all of a cluster's pods live, on cgroup v1 (every controller its own tree) and v2.

`lifecycle` makes it before the kubelet starts (which refuses a root that is missing anywhere), `teardown`
finds the pods' processes in it and removes it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import HostError

_MOUNTINFO = Path("/proc/self/mountinfo")
_V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")


@dataclass(frozen=True)
class Hierarchies:
    """Where the cgroup trees are mounted. With both kinds ("hybrid"), v2 carries no controller of ours."""

    v1: tuple[Path, ...]
    v2: tuple[Path, ...]


def parse(mountinfo: str) -> Hierarchies:
    """The trees of a mountinfo."""
    v1, v2 = [], []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind = after.split(" ", 1)[0]
        point = Path(before.split(" ")[4])
        if kind == "cgroup":
            v1.append(point)
        elif kind == "cgroup2":
            v2.append(point)
    return Hierarchies(tuple(v1), tuple(v2))


def create(name: str) -> None:
    """Makes the cgroup in every tree, ready to have children."""
    found = parse(_MOUNTINFO.read_text())
    if not found.v1 and not found.v2:
        raise HostError("no cgroups are mounted: mount /sys/fs/cgroup")
    for tree in found.v1:
        (tree / name).mkdir(exist_ok=True)
        if (tree / "cpuset.cpus").exists():
            # A v1 cpuset starts empty, and nothing may run in an empty one.
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (tree / name / setting).write_text((tree / setting).read_text())
    if not found.v1:
        _delegate(found.v2[0])
        (found.v2[0] / name).mkdir(exist_ok=True)
    _weigh((*found.v1, *found.v2), name)


def _weigh(trees: tuple[Path, ...], name: str) -> None:
    """A node weighs as much as a busy program for each processor; its pods do not wait for every compiler."""
    for tree in trees:
        for setting, one in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (tree / name / setting).exists():
                (tree / name / setting).write_text(str(one * (os.cpu_count() or 1)))


def processes(name: str) -> set[int]:
    """Every process in the cgroup or below it."""
    pids: set[int] = set()
    for directory in _tree(name):
        try:
            pids.update(map(int, (directory / "cgroup.procs").read_text().split()))
        except OSError:
            continue  # it was removed meanwhile, or is a threaded v2 cgroup, whose parent lists the processes
    return pids


def remove(name: str) -> None:
    """Removes the cgroup and everything below it, which must be empty of processes."""
    for directory in _tree(name):
        try:
            directory.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostError(f"cgroup {directory} cannot be removed: {error.strerror}") from error


def exists(name: str) -> bool:
    """Whether any tree still has it."""
    return any(True for _ in _tree(name))


def _tree(name: str) -> Iterator[Path]:
    """Children before parents, over all trees."""
    found = parse(_MOUNTINFO.read_text())
    # runc makes it in a hybrid's v2 tree too.
    for tree in (*found.v1, *found.v2):
        root = tree / name
        if root.is_dir():
            yield from sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True)
            yield root


def _delegate(tree: Path) -> None:
    available = (tree / "cgroup.controllers").read_text().split()
    enabled = (tree / "cgroup.subtree_control").read_text().split()
    for controller in _V2_CONTROLLERS:
        if controller in available and controller not in enabled:
            try:
                (tree / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError as error:
                raise HostError(
                    f"cgroup v2: {controller} cannot be enabled in {tree}: {error.strerror}"
                ) from error
