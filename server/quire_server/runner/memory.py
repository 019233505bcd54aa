"""How much memory this process may still take, by machine and cgroup. Called by ``runner.kv_cache``."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Cgroup:
    limit: Path
    usage: Path
    stat: Path
    reclaimable: (
        str  # key in ``stat``: file pages, which a model just read fills, and which cost nothing to drop
    )


_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = (
    _Cgroup(_ROOT / "memory.max", _ROOT / "memory.current", _ROOT / "memory.stat", "inactive_file"),
    _Cgroup(
        _ROOT / "memory/memory.limit_in_bytes",
        _ROOT / "memory/memory.usage_in_bytes",
        _ROOT / "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes() -> int:
    """The smaller of what the kernel calls available and what the cgroup's limit leaves."""
    bounds = [_number(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for cgroup in _CGROUPS:
        try:
            limit, usage = int(cgroup.limit.read_text()), int(cgroup.usage.read_text())
            bounds.append(limit - usage + _number(cgroup.stat, cgroup.reclaimable))
        except (OSError, ValueError):
            continue  # another version of cgroups, or no limit ("max")
    return max(0, min(bounds))


def _number(path: Path, key: str) -> int:
    """The number behind a key, in a file of such lines; 0 when there is none."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [key]), 0)
