"""Batches from 1 to 128: tokens per second, and the parts of a step (used by ``bench.batching``).

After each step its recorded calls are repeated: the linear layers alone, and everything but attention, so
that weights are read from the same level of memory as in service. Beside it the machine's limits: bytes read
and numbers multiplied per second.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.compare import REPEATS, table
from bench.engine import Quire, prompts, request
from quire_kernels.cpu.call_recorder import Call
from quire_kernels.cpu.native import NATIVE, Native
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.models.mlp import MLP
from quire_server.runner.host_executor import HostExecutor

PROMPT, ANSWER = 128, 64


def batch_sizes(engine: Quire, sizes: Sequence[int]) -> str:
    """One row per batch. If steps are recorded, also their parts, the cost of one more request, and the
    machine's limits.
    """
    recorded = _Recorded.of(engine)
    steps = {size: _step(engine, recorded, size) for size in sizes}
    heads = ["requests", "tok/s", "ms a step"]
    rows = [[str(n), f"{n / parts.whole:.0f}", f"{parts.whole * 1e3:.1f}"] for n, parts in steps.items()]
    if recorded is None:
        note = f"Prompts of {PROMPT} tokens; the parts of a step are known only where steps are recorded."
        return f"{table(heads, rows)}\n\n{note}"
    model = engine.runner._model
    macs = _multiplications(model.config)  # each with a weight of one byte
    for row, (size, parts) in zip(rows, steps.items(), strict=True):
        row += [f"{seconds * 1e3:.1f}" for seconds in (parts.linear, parts.attention, parts.rest)]
        row += [f"{macs / parts.linear / 1e9:.0f}", f"{size * macs / parts.linear / 1e9:.0f}"]
    heads += ["linear layers", "attention", "the rest", "weights, GB/s", "GMAC/s"]
    few, many = sizes[-2:]
    more = _Parts(*((b - a) / (many - few) for a, b in zip(steps[few], steps[many], strict=True)))
    return table(heads, rows) + (
        f"\n\nPrompts of {PROMPT} tokens. The linear layers have {macs / 1e6:.0f} MB of weights, read once a "
        f"step, and {macs / 1e6:.0f} M multiplications for each row. A sum over 512 MB reads "
        f"{bandwidth() / 1e9:.0f} GB/s, and the same kernel multiplies {_peak(model) / 1e9:.0f} GMAC/s on a "
        f"matrix that stays in the cache, {many} rows at once. One more request from {few} to {many} costs: "
        f"linear layers {more.linear * 1e3:.3f} ms, attention {more.attention * 1e3:.3f} ms, the rest "
        f"{more.rest * 1e3:.3f} ms. No batch can pass {1 / more.whole:.0f} tok/s at that price."
    )


class _Parts(NamedTuple):
    """Seconds of a step."""

    whole: float
    linear: float
    attention: float

    @property
    def rest(self) -> float:
        return self.whole - self.linear - self.attention


def _step(engine: Quire, recorded: "_Recorded | None", size: int) -> _Parts:
    """Medians of the parts of a step in which ``size`` requests decode."""
    taken: list[_Parts] = []
    texts = prompts(size, size, PROMPT, engine.vocab_size)
    for _ in range(REPEATS):
        scheduler = engine.scheduler(streams=size)
        for number, prompt in enumerate(texts):
            scheduler.add(request(number, prompt, ANSWER))
        for step, seconds in engine.steps(scheduler):
            if step.total_tokens == len(step.rows) == size:
                taken.append(_Parts(seconds, *(recorded.again(size) if recorded is not None else (0, 0))))
    return _Parts(*map(statistics.median, zip(*taken, strict=True)))


class _Recorded:
    """The calls of the last step, repeated in parts."""

    def __init__(self, native: Native, calls: Sequence[Call]) -> None:
        self._library = library = native.library
        linear, attention = (native._kernels[name][0] for name in ("int8_linear", "decode_attention"))
        self._linear = library.array_of([call for call in calls if call.kernel == linear])
        self._without = library.array_of([call for call in calls if call.kernel != attention])
        self._all = library.array_of(calls)
        self._is_large = any(call.is_large for call in calls)

    @classmethod
    def of(cls, engine: Quire) -> "_Recorded | None":
        """None if the engine computes layer by layer."""
        executor = engine.runner._executor
        static = executor._recorded_decode if isinstance(executor, HostExecutor) else None
        return None if static is None or NATIVE is None else cls(NATIVE, static._recording._recorder.calls)

    def again(self, rows: int) -> tuple[float, float]:
        """Seconds of the linear layers, and of attention. The latter is the difference between all calls and
        all calls but attention: repeated alone, its data would be in the CPU's cache. All calls come last, so
        that the KV cache is right.
        """
        linear, without, whole = (
            self._seconds(part, rows) for part in (self._linear, self._without, self._all)
        )
        return linear, whole - without

    def _seconds(self, calls: "ctypes.Array[Any]", rows: int) -> float:
        start = time.perf_counter()
        self._library.run(calls, rows, is_large=self._is_large)
        return time.perf_counter() - start


def _multiplications(config: ModelConfig) -> int:
    """Of one token in all linear layers: one per weight."""
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def bandwidth() -> float:
    """Bytes per second when reading 512 MB with all threads."""
    buffer = torch.ones(1 << 26, dtype=torch.int64)
    return buffer.nbytes / min(_seconds(buffer.sum) for _ in range(5))


def _peak(model: Decoder) -> float:
    """Multiplications per second of one layer's widest matrix, repeated."""
    config, mlp = model.config, model.layers[0].mlp
    assert isinstance(mlp, MLP)
    rows = torch.randn(128, config.hidden_size, dtype=model.embedding.dtype)
    seconds = min(_seconds(lambda: mlp._gate_up(rows)) for _ in range(50))
    return rows.shape[0] * config.hidden_size * 2 * config.intermediate_size / seconds


def _seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
