"""A small step computed by a recording equals, to the bit, the same step computed layer by layer."""

from typing import Any

import numpy as np
import pytest
import torch

from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import StartedRow, Step
from quire_server.layers.int4_linear import make_int4_linear
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels
from quire_server.models import registry
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, kv_cache
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.recorded_decode import RecordedDecode

MAX_ROWS, MAX_LEN, BLOCK = 6, 64, 16
SIZES: dict[str, Any] = {
    "vocab_size": 224,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
RECORDED: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 20},
    "Qwen2": {"tie_word_embeddings": False},
}


STEPS = (
    ([33, 1, 64, 16, 17, 5], [1] * 6, [1] * 6),
    ([40], [1], [1]),
    ([9, 50], [1, 1], [1, 1]),
    ([30, 20], [1, 5], [1, 5]),  # drafts to be verified
    ([30, 18], [2, 2], [1, 1]),  # a draft model after accepted drafts
    ([20, 3, 41], [4, 3, 1], [4, 1, 1]),  # with the short rest of a prompt
)


def model_of(family: str, settings: dict[str, Any], dtype: torch.dtype, linear: Any = Int8Linear) -> Decoder:
    config = registry.parse({"architectures": [f"{family}ForCausalLM"]} | SIZES | settings, ())
    made = registry.build(config, max_len=MAX_LEN, dtype=dtype, device=torch.device("cpu"), linear=linear)
    for target in made.targets().values():
        target.normal_(std=0.3)
    made.finish()
    return made


def caches_of(model: Decoder, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    made = kv_cache.allocate(model.config, 32, BLOCK, dtype=dtype, device=torch.device("cpu"))
    for cache in made:
        cache.normal_()
    return made


def step_of(lengths: list[int], counts: list[int], samples: list[int]) -> tuple[Step, InputBatch]:
    """A step over the last tokens of contexts of these lengths."""
    input_batch, blocks = InputBatch(MAX_ROWS, MAX_LEN, BLOCK), iter(torch.randperm(32).tolist())
    started = tuple(
        StartedRow(
            row,
            str(row),
            tuple(torch.randint(224, (length,)).tolist()),
            1,
            tuple(next(blocks) for _ in range(-(-length // BLOCK))),
            SamplingParams(1),
            0,
        )
        for row, length in enumerate(lengths)
    )
    starts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
    step = Step(0, started, (), tuple(range(len(lengths))), starts, tuple(counts), tuple(samples))
    input_batch.apply(step)
    return step, input_batch


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype", "linear"),
    [
        *((family, dtype, Int8Linear) for family in RECORDED for dtype in (torch.float32, torch.bfloat16)),
        ("Llama", torch.float32, make_int4_linear),
        ("Qwen2", torch.bfloat16, make_int4_linear),
    ],
)
def test_logits_and_cache_are_those_of_the_layers_one_by_one(
    family: str, dtype: torch.dtype, linear: Any
) -> None:
    model = model_of(family, RECORDED[family], dtype, linear)
    mine = caches_of(model, dtype)
    static = RecordedDecode.of(model, mine, MAX_ROWS, MAX_LEN // BLOCK)
    assert (static is not None) == has_native_kernels()
    for lengths, counts, samples in STEPS if static else ():
        theirs = tuple(cache.clone() for cache in mine)
        step, rows = step_of(lengths, counts, samples)
        spans, config = StepLayout.of(step), model.config
        by_layers = batch_builder.build(step, spans, rows, config.num_kv_heads, config.windows)
        assert static.takes(step)
        assert torch.equal(static(spans, rows), model(by_layers, theirs))
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("between", [None, STEPS[2]], ids=["next", "after another step"])
def test_what_is_prepared_before_tokens_and_blocks_are_known_does_not_change_a_step(
    between: tuple[list[int], list[int], list[int]] | None,
) -> None:
    model = model_of("Llama", {}, torch.bfloat16)
    mine = caches_of(model, torch.bfloat16)
    static = RecordedDecode.of(model, mine, MAX_ROWS, MAX_LEN // BLOCK)
    if static is None:
        return
    _, rows = step_of([2 * BLOCK, 20], [1, 1], [1, 1])
    layout = StepLayout.of_decodes(np.array([0, 1]), np.array([2 * BLOCK, 20]))
    static.prepare(layout, rows)
    if between is not None:
        step, others = step_of(*between)
        static(StepLayout.of(step), others)
    rows.write(layout.rows, layout.starts, np.array([7, 8]))
    free = next(block for block in range(32) if block not in rows.block_table)
    step = Step(1, (), ((0, free),), (0, 1), (2 * BLOCK, 20), (1, 1), (1, 1))
    rows.apply(step)
    theirs, config = tuple(cache.clone() for cache in mine), model.config
    by_layers = batch_builder.build(step, layout, rows, config.num_kv_heads, config.windows)
    assert torch.equal(static(layout, rows), model(by_layers, theirs))
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "settings", "linear"),
    [
        ("Mixtral", EXPERTS, Int8Linear),  # which experts run depends on the data
        ("Gemma2", {"query_pre_attn_scalar": 20}, Int8Linear),  # soft caps by torch
        ("Llama", {}, registry.Linear),  # dense layers by torch
    ],
)
def test_a_model_with_torch_operations_is_not_recorded(
    family: str, settings: dict[str, Any], linear: Any
) -> None:
    model = model_of(family, settings, torch.bfloat16, linear)
    assert RecordedDecode.of(model, caches_of(model, torch.bfloat16), MAX_ROWS, MAX_LEN // BLOCK) is None


@torch.inference_mode()
def test_long_prompt_chunks_are_computed_layer_by_layer() -> None:
    model = model_of("Llama", {}, torch.bfloat16)
    static = RecordedDecode.of(model, caches_of(model, torch.bfloat16), MAX_ROWS, MAX_LEN // BLOCK)
    if static is not None:
        assert not static.takes(step_of([30, 20], [1, 9], [1, 1])[0])


@torch.inference_mode()
def test_token_ids_beyond_the_vocabulary_are_clamped_to_the_last() -> None:
    model = model_of("Llama", {}, torch.bfloat16)
    static = RecordedDecode.of(model, caches_of(model, torch.bfloat16), MAX_ROWS, MAX_LEN // BLOCK)
    if static is None:
        return
    step, rows = step_of([20], [1], [1])
    logits = []
    for token in (223, 5000):
        rows.tokens[0, 19] = token
        logits.append(static(StepLayout.of(step), rows).clone())
    assert torch.equal(*logits)
