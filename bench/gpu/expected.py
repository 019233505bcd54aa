"""Part: what a review of the code without a GPU expects to hurt: compiling at the start, requests that arrive
one by one, one long sequence among short ones, and cuts of the distribution in each step.

It is the first part, because its answers decide what is changed next. Attention still has its default launch
configs then; the kernels that it compiles are in Triton's cache for the parts after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import triton

from bench.gpu import random_model
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.play import arrive, play, prompts
from bench.gpu.sizes import Sizes
from quire_server.core.sampling_params import SamplingParams
from quire_server.runner.model_runner import ModelRunner

TITLE = "What a review expects to hurt"
SECONDS = 170
COLUMNS = ("result", "median", "99th percentile or most")
_START = "start: every key compiled anew"
_SPARE = 128  # tokens of an answer
_CUT = SamplingParams(1, temperature=0.8, top_p=0.9, ignore_eos=True)


def _arrivals(sizes: Sizes) -> str:
    rate, count, prompt, answer = sizes.arrivals
    return f"{count} requests of {prompt} and {answer} tokens, {rate:g} a second"


def _lengths(sizes: Sizes) -> dict[str, list[int]]:
    many, short, long = sizes.skewed
    return {
        f"{many + 1} sequences of {short}": [short] * (many + 1),
        f"one of {long} among {many} of {short}": [long] + [short] * many,
    }


def _sampled(sizes: Sizes) -> dict[str, tuple[int, SamplingParams]]:
    greedy = SamplingParams(1, temperature=0.0, ignore_eos=True)
    return {
        f"{streams} streams, {name}": (streams, sampling)
        for streams in (min(sizes.streams), max(sizes.streams))
        for name, sampling in (("greedy", greedy), ("temperature 0.8, top_p 0.9", _CUT))
    }


def goals(sizes: Sizes) -> dict[str, str]:
    """By row."""
    expected = {_START: "a start within 300 s", _arrivals(sizes): "no gap of a second"}
    return expected | dict.fromkeys([*_lengths(sizes), *_sampled(sizes)], "")


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """One model for all of it."""
    if all(ledger.has(key) for key in goals(sizes)):
        return
    longest = sizes.skewed[2] + _SPARE
    document = {**sizes.models["8B"], "max_position_embeddings": longest}
    chosen = replace(random_model.options(place, sizes), max_model_len=longest)
    runner = random_model.runner(place, document, chosen)
    if ledger.has(_START):
        runner.capture(lambda done, wanted: None)
    ledger.measure(_START, partial(_start, runner))
    ledger.measure(_arrivals(sizes), partial(_arrive, sizes, runner))
    for key, lengths in _lengths(sizes).items():
        ledger.measure(key, partial(_skewed, sizes, runner, lengths))
    for key, (streams, sampling) in _sampled(sizes).items():
        ledger.measure(key, partial(_sample, sizes, runner, streams, sampling))


def _start(runner: ModelRunner) -> Row:
    """Seconds of the start, and of each compilation within it."""
    with _compilations() as seconds:
        began = perf_counter()
        runner.capture(lambda done, wanted: None)
        took = perf_counter() - began
    return {"start_s": took, "keys": len(seconds), "compile_s": seconds}


@contextmanager
def _compilations() -> Iterator[list[float]]:
    """Within it every key is compiled, also one that is in Triton's cache; seconds of each."""
    seconds: list[float] = []

    def note(*, times: Any, **more: Any) -> None:
        seconds.append(times.total / 1e6)

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        triton.knobs.compilation.listener = note
        yield seconds


def _arrive(sizes: Sizes, runner: ModelRunner) -> Row:
    rate, count, prompt, answer = sizes.arrivals
    asked = prompts(11, count, prompt, runner.model_config.vocab_size)
    arrived = arrive(runner, asked, answer, rate=rate, chunk=_chunk(sizes), block=sizes.block)
    return {
        "output": count * answer / arrived.seconds,
        "ttft_ms": _middle_and_last(arrived.first),
        "gap_ms": _middle_and_last(arrived.gaps),
    }


def _skewed(sizes: Sizes, runner: ModelRunner, lengths: list[int]) -> Row:
    vocab_size = runner.model_config.vocab_size
    asked = [prompts(seed, 1, length, vocab_size)[0] for seed, length in enumerate(lengths)]
    played = play(runner, asked, sizes.lengths[1], chunk=_chunk(sizes), block=sizes.block)
    return {"step_ms": [played.step * 1e3, max(played.steps) * 1e3]}


def _sample(sizes: Sizes, runner: ModelRunner, streams: int, sampling: SamplingParams) -> Row:
    prompt, answer = sizes.lengths
    asked = prompts(streams, streams, prompt, runner.model_config.vocab_size)
    played = play(
        runner, asked, answer, chunk=_chunk(sizes), block=sizes.block, sampling=sampling
    )  # fmt: skip
    return {"step_ms": [played.step * 1e3, max(played.steps) * 1e3]}


def _chunk(sizes: Sizes) -> int:
    return max(max(sizes.long_prompts), max(sizes.streams))


def _middle_and_last(seconds: list[float]) -> list[float]:
    """Milliseconds: the median and the 99th percentile."""
    return [median(seconds) * 1e3, quantiles(seconds, n=100, method="inclusive")[98] * 1e3]


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    if "keys" in row:
        seconds = row["compile_s"] or [0.0]
        said = f"{row['start_s']:.0f} s, of them {sum(seconds):.0f} s to compile {row['keys']} keys"
        return dict(zip(COLUMNS, (said, f"{median(seconds):.1f} s", f"{max(seconds):.1f} s"), strict=True))
    if "output" in row:
        (ttft, last), (gap, longest) = row["ttft_ms"], row["gap_ms"]
        middle, most = (
            f"TTFT {ttft:,.0f} ms, gap {gap:,.1f} ms",
            f"TTFT {last:,.0f} ms, gap {longest:,.1f} ms",
        )
        return dict(zip(COLUMNS, (f"{row['output']:,.0f} tok/s", middle, most), strict=True))
    step, most_ms = row["step_ms"]
    return dict(zip(COLUMNS, ("step", f"{step:.2f} ms", f"{most_ms:.2f} ms"), strict=True))
