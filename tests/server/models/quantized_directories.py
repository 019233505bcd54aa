"""Models in every format of quantised checkpoints, written by a program of their own."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.server.models import families, quantized_matrix

ROOT = Path(__file__).parents[3]


def write(
    path: Path, names: Iterable[str], more: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> Path:
    """PATH/FAMILY/FORMAT and PATH/FAMILY/FORMAT.float, as ``quantized_families`` has it. ``more``: settings
    by family.
    """
    for family in names:
        settings = quantized_matrix.settings(family) | more.get(family, {})
        families.build(path / family / "float", family, settings)
    program = [sys.executable, "-m", "tests.server.models.quantized_families", str(path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return path
