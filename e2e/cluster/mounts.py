"""Mounts below a directory: found in mountinfo, unmounted, and never deleted through.

A pod's volume may be a bind mount of files worth keeping (a model), so
that a tree is removed only when nothing is mounted in it any more.
"""

import re
import shutil
import subprocess
from pathlib import Path

from e2e.cluster.errors import ClusterError

_MOUNTINFO = Path("/proc/self/mountinfo")


def parse(mountinfo: str) -> list[Path]:
    """The mount points, in the order in which they were mounted."""
    points = []
    for line in mountinfo.splitlines():
        raw = line.split(" ")[4].removesuffix("//deleted")
        points.append(Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), raw)))
    return points


def below(directory: Path) -> list[Path]:
    """The mount points at or below a directory, last mounted first."""
    points = parse(_MOUNTINFO.read_text())
    return [point for point in reversed(points) if point.is_relative_to(directory)]


def bind(source: Path, target: Path) -> None:
    """Shows a directory at a second place."""
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)


def unmount_below(directory: Path) -> None:
    """Unmounts them all; what is busy is detached."""
    for _ in range(10):  # mounts may lie on each other
        points = below(directory)
        if not points:
            return
        for point in points:
            subprocess.run(["umount", "--lazy", "--no-canonicalize", str(point)], capture_output=True)
    raise ClusterError(
        f"still mounted: {', '.join(map(str, below(directory)))}: unmount by hand, then try again"
    )


def remove_tree(path: Path) -> None:
    """Deletes a file or a tree; refuses while anything is mounted in it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    mounted = below(path)
    if mounted:
        raise ClusterError(f"{mounted[0]} is still mounted: {path} is left alone")
    if path.exists():
        shutil.rmtree(path)
