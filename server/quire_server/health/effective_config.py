"""What the engine serves with after it has loaded the model, for /statusz: context, dtype, quantisation.

Settings leave these open, and the memory and the CPU decide, so only the loaded engine knows. It writes them
once into a file of the run directory; the health process reads it for each request. Stdlib only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILE = "effective-config.json"


@dataclass(frozen=True)
class EffectiveConfig:
    """`wanted_model_len`: the context that was asked for, else the model's own. `inexact_defaults`: settings
    left to their defaults that make answers less exact than the model's files would.
    """

    max_model_len: int
    wanted_model_len: int
    dtype: str
    quantization: str
    inexact_defaults: tuple[str, ...] = ()


def write(run_dir: Path, effective: EffectiveConfig) -> None:
    """Write the file, so that a reader sees all of it or none."""
    document = {
        "maxModelLen": effective.max_model_len,
        "wantedModelLen": effective.wanted_model_len,
        "dtype": effective.dtype,
        "quantization": effective.quantization,
        "inexactDefaults": effective.inexact_defaults,
    }
    new = run_dir / f"{_FILE}.new"
    new.write_text(json.dumps(document))
    new.replace(run_dir / _FILE)


def read(run_dir: Path) -> Mapping[str, object] | None:
    """The document for /statusz; None while the model loads."""
    try:
        document: Mapping[str, object] = json.loads((run_dir / _FILE).read_text())
    except FileNotFoundError:
        return None
    return document
