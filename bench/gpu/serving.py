"""Part: whole models, with what a server does in a step, beside the fastest that the memory allows."""

import gc
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu import random_model
from bench.gpu.case import SHEET
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.play import play, prompts
from bench.gpu.sizes import Model, Sizes
from quire_server.runner.model_runner import ModelRunner

TITLE = "Whole models"
SECONDS = 260
COLUMNS = (
    "output tok/s",
    "step, ms",
    "tok/s while all decode",
    "% of the bound at 4.8 TB/s",
    "TTFT, ms: median, last",
)
# name: (which models, what the cache holds, how the weights are stored)
ARITHMETIC: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "bf16": (("8B", "1B"), "auto", {}),
    "bf16, fp8 KV": (("8B",), "fp8", {}),
    "fp8": (("8B",), "auto", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "W4": (("8B",), "auto", {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}),
}
_GOALS = {
    "8B bf16, 1 streams": ">= 240 tok/s",
    "8B fp8, 1 streams": ">= 350 tok/s",
    "8B bf16, 256 streams": ">= 12,000 output tok/s",
}


def _keys(sizes: Sizes, model: str, name: str) -> dict[str, tuple[int, int, int]]:
    """(streams, prompt, answer) by row."""
    prompt, answer = sizes.lengths
    found = {f"{model} {name}, {streams} streams": (streams, prompt, answer) for streams in sizes.streams}
    return found | {f"{model} {name}, prompt of {length}": (1, length, 2) for length in sizes.long_prompts}


def goals(sizes: Sizes) -> dict[str, str]:
    """By row."""
    keys = [
        key
        for name, (models, _, _) in ARITHMETIC.items()
        for model in models
        for key in (f"{model} {name}, start", *_keys(sizes, model, name))
    ]
    return {key: _GOALS.get(key, "") for key in keys}


def _document(sizes: Sizes, model: str, stored: dict[str, Any]) -> Model:
    """The model's config.json, with its weights so stored."""
    if not stored:
        return sizes.models[model]
    more = {"group_size": sizes.group} if stored["quant_method"] == "awq" else {}
    return {**sizes.models[model], "quantization_config": stored | more}


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """One model after the other, each with all its rows."""
    for name, (models, kv_cache_dtype, stored) in ARITHMETIC.items():
        for model in models:
            keys = _keys(sizes, model, name)
            if all(ledger.has(key) for key in keys):
                continue
            chosen = random_model.options(place, sizes, kv_cache_dtype=kv_cache_dtype)
            document = _document(sizes, model, stored)
            runner = random_model.runner(place, document, chosen)
            ledger.measure(f"{model} {name}, start", partial(_captured, runner))
            for key, load in keys.items():
                measure = partial(_measure, place, sizes, runner, document, kv_cache_dtype, load)
                ledger.measure(key, measure)
            del runner, measure
            gc.collect()
            if place.device.type == "cuda":
                torch.cuda.empty_cache()


def _captured(runner: ModelRunner) -> Row:
    runner.capture(lambda done, wanted: None)
    return {"memory": {kind: count / 2**30 for kind, count in runner.gpu_memory.items()}}


def _measure(
    place: Place,
    sizes: Sizes,
    runner: ModelRunner,
    document: Model,
    kv_cache_dtype: str,
    load: tuple[int, int, int],
) -> Row:
    streams, prompt, answer = load
    asked = prompts(streams, streams, prompt, runner.model_config.vocab_size)
    chunk = max(max(sizes.long_prompts), max(sizes.streams))
    if place.device.type == "cuda":  # compilers and libraries first
        play(runner, asked, 2, chunk=chunk, block=sizes.block)
    played = play(runner, asked, answer, chunk=chunk, block=sizes.block)
    moved = random_model.read_bytes(document)
    moved += streams * (prompt + answer // 2) * random_model.kv_token_bytes(document, kv_cache_dtype)
    return {
        "output": streams * answer / played.seconds,
        "step_ms": played.step * 1e3,
        "decode": streams / played.step,
        "bound": streams * SHEET / moved,
        "ttft_ms": [median(played.first) * 1e3, max(played.first) * 1e3],
        "is_prompt": prompt > sizes.lengths[0],
        "prompt_tok_s": streams * prompt / max(played.first),
    }


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    if "memory" in row:
        return {COLUMNS[0]: "GiB: " + ", ".join(f"{kind} {size:.2f}" for kind, size in row["memory"].items())}
    middle, last = row["ttft_ms"]
    if row["is_prompt"]:
        return {
            "output tok/s": f"prompts {row['prompt_tok_s']:,.0f}",
            "TTFT, ms: median, last": f"{middle:,.1f}",
        }
    return {
        "output tok/s": f"{row['output']:,.0f} (prompts {row['prompt_tok_s']:,.0f})",
        "step, ms": f"{row['step_ms']:.2f}",
        "tok/s while all decode": f"{row['decode']:,.0f}",
        "% of the bound at 4.8 TB/s": f"{row['decode'] / row['bound']:.0%}",
        "TTFT, ms: median, last": f"{middle:,.1f}, {last:,.1f}",
    }
