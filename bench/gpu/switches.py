"""Part: what graphs, steps ahead and cached prefixes bring, each with and without."""

from functools import partial
from statistics import median

from bench.gpu import random_model
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.play import play, prompts
from bench.gpu.sizes import Sizes
from quire_server.runner.model_runner import ModelRunner

TITLE = "With and without"
SECONDS = 120
COLUMNS = ("step, us", "host's launch of a step, us", "TTFT, ms")
_MODEL = "8B"
# name: (graphs, a step ahead); those without graphs first, for captured ones stay
_WAYS = {
    "kernel by kernel": (False, True),
    "kernel by kernel, nothing ahead": (False, False),
    "graphs": (True, True),
    "graphs, nothing ahead": (True, False),
}


def _streams(sizes: Sizes) -> tuple[int, ...]:
    return tuple(streams for streams in sizes.streams if streams in (1, 2, 32, 256))


def _decodes(sizes: Sizes) -> dict[str, tuple[bool, bool, int]]:
    return {
        f"{name}, {streams} streams": (graphs, ahead, streams)
        for name, (graphs, ahead) in _WAYS.items()
        for streams in _streams(sizes)
    }


def _prompts(sizes: Sizes) -> dict[str, int]:
    length = sizes.long_prompts[0]
    return {f"prompt of {length}, new": 1, f"prompt of {length}, cached": 2}


def goals(sizes: Sizes) -> dict[str, str]:
    """None: it is the differences that count."""
    return dict.fromkeys([*_decodes(sizes), *_prompts(sizes)], "")


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """One model for all of it."""
    if all(ledger.has(key) for key in goals(sizes)):
        return
    runner = random_model.runner(place, sizes.models[_MODEL], random_model.options(place, sizes))
    has_graphs = False
    for key, (graphs, ahead, streams) in _decodes(sizes).items():
        if graphs and not has_graphs:
            runner.capture(lambda done, wanted: None)
            has_graphs = True
        ledger.measure(key, partial(_decode, place, sizes, runner, streams, ahead=ahead))
    for key, rounds in _prompts(sizes).items():
        ledger.measure(key, partial(_prompt, place, sizes, runner, rounds))


def _chunk(sizes: Sizes) -> int:
    return max(max(sizes.long_prompts), max(sizes.streams))


def _decode(place: Place, sizes: Sizes, runner: ModelRunner, streams: int, *, ahead: bool) -> Row:
    prompt, answer = sizes.lengths
    asked = prompts(streams, streams, prompt, runner.model_config.vocab_size)
    if place.device.type == "cuda":
        play(runner, asked, 2, chunk=_chunk(sizes), block=sizes.block)
    played = play(runner, asked, answer, chunk=_chunk(sizes), block=sizes.block, ahead=ahead)
    return {"step_us": played.step * 1e6, "launch_us": median(played.launches) * 1e6}


def _prompt(place: Place, sizes: Sizes, runner: ModelRunner, rounds: int) -> Row:
    asked = prompts(7, 1, sizes.long_prompts[0], runner.model_config.vocab_size)
    if place.device.type == "cuda":
        play(runner, asked, 2, chunk=_chunk(sizes), block=sizes.block, rounds=rounds)
    played = play(runner, asked, 2, chunk=_chunk(sizes), block=sizes.block, rounds=rounds)
    return {"ttft_ms": played.first[0] * 1e3}


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    if "ttft_ms" in row:
        return {"TTFT, ms": f"{row['ttft_ms']:,.2f}"}
    return {"step, us": f"{row['step_us']:,.0f}", "host's launch of a step, us": f"{row['launch_us']:,.0f}"}
