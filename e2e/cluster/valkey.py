"""Debian's Valkey, or the Redis of older releases, which speaks the same protocol."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster import debian


def unpack(state: Path) -> list[str]:
    """The command that starts the server, which is fetched into `state` when it is not there."""
    name = "valkey" if debian.has("valkey-server") else "redis"
    program = f"usr/bin/{name}-server"
    root = debian.unpack(state, name, [f"{name}-server", f"{name}-tools", "liblzf1", "libjemalloc2"], program)
    (library,) = root.glob("usr/lib/*/libjemalloc.so.2")
    return ["env", f"LD_LIBRARY_PATH={library.parent}", str(root / program)]
