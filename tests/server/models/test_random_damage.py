"""Randomly damaged files load or raise our own errors, and nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.models import registry, rope
from tests.server.models import directories
from tests.server.models.published import PUBLISHED
from tests.server.models.variants import SIZES, VARIANTS
from tests.server.runner.in_process import load

DOCUMENTS: list[dict[str, Any]] = [
    *(document for document, _ in PUBLISHED.values()),
    *({"architectures": [f"{name}ForCausalLM"]} | SIZES | more for name, more in VARIANTS.values()),
]
EXTREMES = st.sampled_from([1 << 24, 1 << 63, 1e-300, 1e300, 1 + 1e-15])
NUMBERS = st.one_of(st.integers(-2, 3), st.integers(), st.floats(), EXTREMES)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5))
VALUES = st.one_of(
    LEAVES, st.lists(LEAVES, max_size=3), st.dictionaries(st.text(max_size=3), LEAVES, max_size=2)
)


@given(data=st.data())
def test_a_config_with_any_values_is_parsed_or_refused(data: st.DataObject) -> None:
    document = json.loads(json.dumps(data.draw(st.sampled_from(DOCUMENTS))))
    for _ in range(data.draw(st.integers(1, 3))):
        inner = document
        ropes = [key for key in ("rope_scaling", "rope_parameters") if isinstance(document.get(key), dict)]
        if ropes and data.draw(st.booleans()):
            inner = document[ropes[0]]
        inner[data.draw(st.sampled_from(sorted(inner) or ["factor"]))] = data.draw(VALUES)
    try:
        config = registry.parse(document, ())
    except (ConfigError, ModelCorruptError) as error:
        assert len(str(error)) < 500
        return
    for kind in {layer.rope for layer in config.layers}:
        cos, sin = rope.tables(kind, 4)
        assert cos.shape == sin.shape == (4, kind.size // 2)
    assert 0 < config.max_position <= 1 << 24


@pytest.mark.parametrize("seed", range(4))
def test_a_header_with_any_bytes_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    path = directories.write(tmp_path) / "model.safetensors"
    good, random = path.read_bytes(), np.random.default_rng(seed)
    length = 8 + int.from_bytes(good[:8], "little")
    for _ in range(50):
        data = bytearray(good)
        for position in random.integers(0, length, 3):
            data[position] = random.integers(32, 127)
        path.write_bytes(data)
        try:
            load(tmp_path)
        except (ConfigError, ModelCorruptError) as error:
            assert "model.safetensors" in str(error) or "in no file" in str(error)
