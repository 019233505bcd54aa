"""How much memory this process may still take, by the machine and by its cgroup. Called by
``runner.kv_cache``.
"""

from pathlib import Path

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int:
    """The smaller of what the kernel calls available and what the cgroup's limit leaves."""
    bounds = [_machine_available()]
    for limit_path, usage_path in _CGROUPS:
        limit, usage = _number(limit_path), _number(usage_path)
        if limit is not None and usage is not None:
            bounds.append(limit - usage)
    return max(0, min(bounds))


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _number(path: Path) -> int | None:
    """None when there is no such file, or no limit ('max')."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
