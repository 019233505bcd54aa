"""Part: tensor parallel. What one shard of a model takes, alone on a GPU with a stub in place of the others;
and what a sum between two GPUs takes, by the one-shot kernel and by NCCL; and what a stage sends to the next.
"""

import gc
from functools import partial

import torch
from torch import Tensor

from bench.gpu import random_model, sums
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.play import play, prompts
from bench.gpu.sizes import Sizes
from quire_server.core.topology import Topology
from quire_server.layers.parallel import OneStage
from quire_server.runner.model_runner import ModelRunner

TITLE = "Tensor parallel: a shard alone, and sums between GPUs"
SECONDS = 80
COLUMNS = ("step, ms", "of the whole model's", "one-shot, us", "NCCL, us")
_RANKS = (1, 2, 4)
_STREAMS = (1, 2, 32)
_PARTS = (8 << 10, 64 << 10, 512 << 10)  # bytes: 1, 8 and 64 tokens of 4,096 in bfloat16
_STATES = (16 << 10, 1 << 20)  # bytes: 1 and 64 tokens, two rows of 4,096 each
_GPUS = 2
#: Rows of groups of nodes, which one machine cannot fill.
OF_NODES = (
    *(f"sum of {size >> 10} KiB between 2 nodes" for size in _PARTS),
    *(f"states of {size >> 10} KiB to a stage on another node" for size in _STATES),
    "from a lost node to the end of all ranks",
)


class Stub(OneStage):
    """In place of the other ranks: sums and gathers of the right shape, without an exchange."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.calls = self.bytes = 0
        self.waited = 0.0

    def all_reduce(self, part: Tensor) -> Tensor:
        """The part alone."""
        return part

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """The part, once for each rank."""
        return part.repeat(1, self._ranks)

    def abort(self) -> None:
        """No rank waits for this one."""


def _streams(sizes: Sizes) -> tuple[int, ...]:
    return tuple(streams for streams in sizes.streams if streams in _STREAMS)


def goals(sizes: Sizes) -> dict[str, str]:
    """None for a shard: it is what it costs. A sum is to be faster than NCCL's. Nothing measures ranks of
    several nodes.
    """
    shards = {_shard(ranks, streams): "" for ranks in _RANKS for streams in _streams(sizes)}
    sums_of_parts = {_sum(size): "one-shot below NCCL" for size in _PARTS}
    of_states = {_states(size): "" for size in _STATES}
    return shards | sums_of_parts | of_states | dict.fromkeys(OF_NODES, "two machines needed")


def _shard(ranks: int, streams: int) -> str:
    return f"8B bf16, 1 of {ranks} shards, {streams} streams"


def _sum(size: int) -> str:
    return f"sum of {size >> 10} KiB between {_GPUS} GPUs"


def _states(size: int) -> str:
    return f"states of {size >> 10} KiB to the next stage"


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """One shard after the other, then the exchanges."""
    document = sizes.models["8B"]
    for ranks in _RANKS:
        keys = {_shard(ranks, streams): streams for streams in _streams(sizes)}
        if all(ledger.has(key) for key in keys):
            continue
        chosen = random_model.options(place, sizes)
        topology = Topology(ranks)
        runner = random_model.runner(place, document, chosen, topology=topology, communicator=Stub(ranks))
        for key, streams in keys.items():
            ledger.measure(key, partial(_decode, place, sizes, runner, streams))
        del runner
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    for size in _PARTS:
        ledger.measure(_sum(size), partial(sums.measure, place, _GPUS, size))
    for size in _STATES:
        ledger.measure(_states(size), partial(sums.measure_states, place, size))


def _decode(place: Place, sizes: Sizes, runner: ModelRunner, streams: int) -> Row:
    prompt, answer = sizes.lengths
    asked = prompts(streams, streams, prompt, runner.model_config.vocab_size)
    chunk = max(max(sizes.long_prompts), max(sizes.streams))
    if place.device.type == "cuda":
        play(runner, asked, 2, chunk=chunk, block=sizes.block)
    # As ranks do: no step is launched ahead of the tokens of the one before.
    played = play(runner, asked, answer, chunk=chunk, block=sizes.block, ahead=False)
    return {"step_ms": played.step * 1e3, "streams": streams}


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    if "step_ms" not in row:
        return {key: f"{row[key]:.1f}" for key in COLUMNS[2:] if row.get(key) is not None}
    shown = {"step, ms": f"{row['step_ms']:.2f}"}
    whole = rows.get(_shard(1, row["streams"]), {})
    if "step_ms" in whole:
        shown["of the whole model's"] = f"{row['step_ms'] / whole['step_ms']:.0%}"
    return shown
