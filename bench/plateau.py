"""Batches from 1 to 128: tokens a second, and what a step consists of. Imported by ``batching.py``.

The clock stands in the model itself, around each linear layer and each attention, so that the weights come
from where they come from in service. Beside it what the machine can do: bytes read, numbers multiplied.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.compare import REPEATS, table
from bench.engine import Quire, prompts, request
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.models.mlp import MLP

PROMPT, ANSWER = 128, 64
LINEAR, ATTENTION, OTHER = "linear layers", "attention", "the rest"
Parts = dict[str, float]  # seconds


def plateau(engine: Quire, sizes: Sequence[int]) -> str:
    """One row for each batch, what one more request costs at the end, and the machine's limits."""
    model = engine.runner._model
    macs = _multiplications(model.config)
    weight_bytes = macs * (1 if engine.runner.quantization == "int8" else model.embedding.element_size())
    steps = {size: _step(engine, model, size) for size in sizes}
    rows = []
    for size, parts in steps.items():
        whole, linear = sum(parts.values()), parts[LINEAR]
        rows.append(
            [
                str(size),
                f"{size / whole:.0f}",
                f"{whole * 1e3:.1f}",
                *(f"{parts[name] * 1e3:.1f}" for name in (LINEAR, ATTENTION, OTHER)),
                f"{weight_bytes / linear / 1e9:.0f}",
                f"{size * macs / linear / 1e9:.0f}",
            ]
        )
    heads = ["requests", "tok/s", "ms a step", LINEAR, ATTENTION, OTHER, "weights, GB/s", "GMAC/s"]
    few, many = sizes[-2:]
    more = {name: (steps[many][name] - steps[few][name]) / (many - few) for name in steps[many]}
    costs = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in more.items())
    return table(heads, rows) + (
        f"\n\nPrompts of {PROMPT} tokens. The linear layers have {weight_bytes / 1e6:.0f} MB of "
        f"weights, read once a step, and {macs / 1e6:.0f} M multiplications for each row. This machine reads "
        f"{_bandwidth() / 1e9:.0f} GB/s, and the same kernel multiplies {_peak(model) / 1e9:.0f} GMAC/s on a "
        f"matrix that stays in the cache, {many} rows at once. One more request from {few} to {many} costs: "
        f"{costs}. No batch can pass {1 / sum(more.values()):.0f} tok/s at that price."
    )


def _step(engine: Quire, model: Decoder, size: int) -> Parts:
    """Medians of the parts of a step in which ``size`` requests decode."""
    taken: dict[str, list[float]] = {LINEAR: [], ATTENTION: [], OTHER: []}
    texts = prompts(size, size, PROMPT, engine.vocab_size)
    for _ in range(REPEATS):
        scheduler = engine.scheduler(streams=size)
        for number, prompt in enumerate(texts):
            scheduler.add(request(number, prompt, ANSWER))
        with _clocked(model) as spent:
            for step, seconds in engine.steps(scheduler):
                if step.total_tokens == len(step.rows) == size:
                    taken[LINEAR].append(spent[LINEAR])
                    taken[ATTENTION].append(spent[ATTENTION])
                    taken[OTHER].append(seconds - sum(spent.values()))
                spent.update(dict.fromkeys(spent, 0.0))
    return {name: statistics.median(values) for name, values in taken.items()}


@contextmanager
def _clocked(model: Decoder) -> Iterator[Parts]:
    """Seconds since they were last set to 0, by part; the model is as before in the end."""
    spent = {LINEAR: 0.0, ATTENTION: 0.0}

    def clocked(part: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(*arguments: object) -> Tensor:
            start = time.perf_counter()
            result = call(*arguments)
            spent[part] += time.perf_counter() - start
            return result

        return timed

    places: list[tuple[object, str, str]] = [(model, "head", LINEAR)]
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP), "a dense model"
        places += [(layer, "attention", ATTENTION), (layer, "qkv", LINEAR), (layer, "output", LINEAR)]
        places += [(layer.mlp, "_gate_up", LINEAR), (layer.mlp, "_down", LINEAR)]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), call in zip(places, before, strict=True):
        setattr(owner, name, clocked(part, call))
    try:
        yield spent
    finally:
        for (owner, name, _), call in zip(places, before, strict=True):
            setattr(owner, name, call)


def _multiplications(config: ModelConfig) -> int:
    """Of one token, in all linear layers: as many as they have weights."""
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def _bandwidth() -> float:
    """Bytes a second out of 512 MB, by all threads."""
    buffer = torch.ones(1 << 26, dtype=torch.int64)
    return buffer.nbytes / min(_seconds(buffer.sum) for _ in range(5))


def _peak(model: Decoder) -> float:
    """Multiplications a second of one layer's widest matrix, again and again."""
    config, mlp = model.config, model.layers[0].mlp
    assert isinstance(mlp, MLP)
    rows = torch.randn(128, config.hidden_size, dtype=model.embedding.dtype)
    seconds = min(_seconds(lambda: mlp._gate_up(rows)) for _ in range(50))
    return rows.shape[0] * config.hidden_size * 2 * config.intermediate_size / seconds


def _seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
