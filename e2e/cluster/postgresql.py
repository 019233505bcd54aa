"""Debian's PostgreSQL, for tests that start one: what is installed, else unpacked beside the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import debian
from e2e.cluster.errors import HostError

_INSTALLED = Path("/usr/lib/postgresql")
_PROGRAM = "*/bin/initdb"


@dataclass(frozen=True)
class Programs:
    """Where they are, and the directory of their libraries where these are not the system's."""

    bin: Path
    libraries: Path | None = None


def unpack(state: Path) -> Programs:
    """The programs, which are fetched into `state` when they are nowhere."""
    if (installed := _newest(_INSTALLED)) is not None:
        return Programs(installed)
    program = f"usr/lib/postgresql/{_PROGRAM}"
    root = debian.unpack(state, "postgresql", ["postgresql"], program, with_dependencies=True)
    found = _newest(root / "usr/lib/postgresql")
    if found is None:
        raise HostError("Debian's package has no PostgreSQL: apt-get install postgresql")
    return Programs(found, next((root / "usr/lib").glob("*-linux-gnu"), None))


def _newest(versions: Path) -> Path | None:
    found = sorted(versions.glob(_PROGRAM), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None
