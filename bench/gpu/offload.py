"""Part: what weights that stay on the host cost each token, beside the same model on the GPU."""

import gc
from functools import partial

import torch

from bench.gpu import random_model
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.play import play, prompts
from bench.gpu.sizes import Model, Sizes
from quire_server.runner.model_runner import ModelRunner

TITLE = "Weights on the host, all kernel by kernel"
SECONDS = 100
COLUMNS = ("step, ms", "more for each token, ms", "GB/s from the host")
_SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}  # of the layers
_LEAST_LAYERS = 6  # half of fewer would be too few to stream


def _document(sizes: Sizes) -> Model:
    model = sizes.models["8B"]
    return {**model, "num_hidden_layers": max(model["num_hidden_layers"], _LEAST_LAYERS)}


def _streams(sizes: Sizes) -> tuple[int, ...]:
    return tuple(streams for streams in sizes.streams if streams in (1, 2, 32))


def goals(sizes: Sizes) -> dict[str, str]:
    """None: it is what it costs."""
    return {_key(name, streams): "" for name in _SHARES for streams in _streams(sizes)}


def _key(name: str, streams: int) -> str:
    return f"8B bf16, {name} of the layers on the host, {streams} streams"


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """One model after the other."""
    document = _document(sizes)
    layers = random_model.layer_bytes(document)
    for name, share in _SHARES.items():
        keys = {_key(name, streams): streams for streams in _streams(sizes)}
        if all(ledger.has(key) for key in keys):
            continue
        room = share * sum(layers) / (1 << 30)
        chosen = random_model.options(place, sizes, cpu_offload_gb=room)
        runner = random_model.runner(place, document, chosen)
        for key, streams in keys.items():
            ledger.measure(key, partial(_decode, place, sizes, runner, streams))
        del runner
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()


def _decode(place: Place, sizes: Sizes, runner: ModelRunner, streams: int) -> Row:
    prompt, answer = sizes.lengths
    asked = prompts(streams, streams, prompt, runner.model_config.vocab_size)
    chunk = max(max(sizes.long_prompts), max(sizes.streams))
    if place.device.type == "cuda":
        play(runner, asked, 2, chunk=chunk, block=sizes.block)
    played = play(runner, asked, answer, chunk=chunk, block=sizes.block)
    return {"step_ms": played.step * 1e3, "streamed": runner.streamed_bytes, "streams": streams}


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    shown = {"step, ms": f"{row['step_ms']:.2f}"}
    without = rows.get(_key("none", row["streams"]), {})
    if row["streamed"] and "step_ms" in without:
        more = (row["step_ms"] - without["step_ms"]) / row["streams"]
        shown["more for each token, ms"] = f"{more:.2f}"
        shown["GB/s from the host"] = f"{row['streamed'] / row['step_ms'] / 1e6:.1f}"
    return shown
