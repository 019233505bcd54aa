"""The cgroup under which all of a cluster's pods live, on cgroup v1 (every controller its own tree) and v2.

`lifecycle` makes it before the kubelet starts (which refuses a root that is missing anywhere), `teardown`
finds the pods' processes in it and removes it.
"""

from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.errors import HostError

_MOUNTINFO = Path("/proc/self/mountinfo")
_V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")


def parse_hierarchies(mountinfo: str) -> tuple[tuple[Path, ...], bool]:
    """Where the cgroup trees are mounted, and whether they are v2's one tree."""
    v1, v2 = [], []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind = after.split(" ", 1)[0]
        point = Path(before.split(" ")[4])
        if kind == "cgroup":
            v1.append(point)
        elif kind == "cgroup2":
            v2.append(point)
    # With both, v2 carries no controller of ours (systemd's "hybrid").
    return (tuple(v1), False) if v1 else (tuple(v2[:1]), True)


def create(name: str) -> None:
    """Makes the cgroup in every tree, ready to have children."""
    trees, unified = parse_hierarchies(_MOUNTINFO.read_text())
    if not trees:
        raise HostError("no cgroups are mounted: mount /sys/fs/cgroup")
    for tree in trees:
        if unified:
            _delegate(tree)
        (tree / name).mkdir(exist_ok=True)
        if (tree / "cpuset.cpus").exists() and not unified:
            # A v1 cpuset starts empty, and nothing may run in an empty one.
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (tree / name / setting).write_text((tree / setting).read_text())


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
    trees, _ = parse_hierarchies(_MOUNTINFO.read_text())
    for tree in trees:
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
