"""The canary's first answer and its fingerprint, for /statusz: the operator keeps those of the first ready
replica, and other replicas compare theirs with them.

The engine writes them once into a file of the run directory; the health process reads it for each request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = "canary.json"


def write(run_dir: Path, fingerprint: str, tokens: Sequence[int]) -> None:
    """Write the file, so that a reader sees all of it or none."""
    new = run_dir / f"{_FILE}.new"
    new.write_text(json.dumps({"fingerprint": fingerprint, "tokens": list(tokens)}))
    new.replace(run_dir / _FILE)


def read(run_dir: Path) -> Mapping[str, object] | None:
    """The document for /statusz; None until the canary has run."""
    try:
        document: Mapping[str, object] = json.loads((run_dir / _FILE).read_text())
    except FileNotFoundError:
        return None
    return document
