"""What a server serves with where the settings leave it open: /statusz says it, as the operator reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire_operator.reports import Effective, parse_statusz
from quire_server.layers.int8_linear import has_native_kernels, native_kernels
from tests.server.launch import Server


def effective(model: Path, directory: Path, *flags: str) -> tuple[Effective, int]:
    """What the operator reads from /statusz, and the context that clients see."""
    with Server(model, directory, *flags) as server:
        server.wait_ready()
        sample = parse_statusz(json.dumps(server.statusz()).encode())
        with server.client() as client:
            seen: Any = client.models.list().data[0].model_extra
    assert sample is not None and sample.effective is not None
    return sample.effective, seen["max_model_len"]


def test_a_small_kv_cache_is_said_with_the_context_that_it_leaves_and_the_models_own(
    tiny: Path, tmp_path: Path
) -> None:
    own = json.loads((tiny / "config.json").read_text())["max_position_embeddings"]
    found, seen = effective(tiny, tmp_path, "--num-gpu-blocks-override", "11", "--dtype", "float32")

    assert (found.max_model_len, found.wanted_model_len) == (11 * 16, own)
    assert found.max_model_len == seen < own
    assert (found.dtype, found.quantization, found.inexact_defaults) == ("float32", "none", ())
    assert found.native_kernels == native_kernels()


@pytest.mark.deep
def test_a_context_that_was_asked_for_is_the_wanted_one_and_arithmetic_by_default_is_named_where_it_rounds(
    tiny: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    model = tmp_path / "bf16"
    model.mkdir()
    for file in tiny.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    found, seen = effective(model, tmp_path, "--max-model-len", "64")

    assert (found.max_model_len, found.wanted_model_len, seen) == (64, 64, 64)
    is_rounded = has_native_kernels()
    assert found.quantization == ("int8" if is_rounded else "none")
    assert found.inexact_defaults == (("quantization",) if is_rounded else ())
