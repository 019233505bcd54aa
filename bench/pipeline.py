"""How busy the stages of a pipeline are, beside the formula: `python -m bench.pipeline`.

Scheduler, messages, connections and processes are the server's own. The layers of each stage take a fixed
time, by sleeping: so the figure is that of stages with a device each, whatever else this machine does, and
shows what the pipeline itself loses. Decoding takes utilisation min(1, streams / stages) * mean / max of the
stages' times. Beside it the same scheduler on a virtual clock, where handing over takes no time.
"""

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from bench.compare import table
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.topology import Topology
from quire_server.engine import rank
from quire_server.engine.engine_core import StepExecutor, StepPipeline
from quire_server.engine.rank_channel import Channel, ChannelClosedError
from quire_server.engine.rank_group import RankGroup
from quire_server.layers import communicators
from quire_server.layers.parallel import STAGE_DEADLINE, Meeting
from quire_server.models.decoder import Decoder
from quire_server.runner.config import RunnerConfig
from quire_server.runner.model_runner import ModelRunner
from quire_server.runner.rank_executor import FollowerRunner
from quire_server.runner.ranks import SINGLE, Membership
from tests.server.core.fake_runner import FakeRunner
from tests.server.core.fake_stages import FakeStages
from tests.server.models import families

Span = tuple[float, float]
STREAMS = (1, 2, 3, 7)
BLOCKS, WARM_TOKENS = 400, 4


class PacedLayer:
    """A layer that does nothing; the last one of a stage takes what is left of the stage's time."""

    def __init__(self, layer: object, wait: Callable[[], object]) -> None:
        self.rope = layer.rope  # type: ignore[attr-defined]  # torch types attributes as modules
        self._wait = wait

    def __call__(self, hidden: Tensor | None, residual: Tensor, *rest: object) -> Tensor:
        self._wait()
        return residual if hidden is None else hidden


class Pace:
    """Makes each pass of a stage take the same time, and notes when it was."""

    def __init__(self, model: Decoder, seconds: float) -> None:
        self.busy: list[Span] = []
        self._seconds = seconds
        layers = [PacedLayer(layer, bool) for layer in model.layers[:-1]]
        last = PacedLayer(model.layers[-1], self._take)
        model.layers = [*layers, last]  # type: ignore[list-item]  # it stands in for a layer

    def _take(self) -> None:
        begin = time.monotonic()
        time.sleep(self._seconds)  # in place of computing, so that stages share no core
        self.busy.append((begin, time.monotonic()))


def options(stages: int) -> RunnerConfig:
    """The runner's, on every rank."""
    return RunnerConfig(
        dtype="float32",
        quantization="none",
        max_num_seqs=max(STREAMS),
        num_blocks_override=BLOCKS,
        pipeline_parallel_size=stages,
    )


def membership(directory: Path, number: int, stages: int) -> Membership:
    """A rank's place."""
    topology = Topology(1, number, stages)
    communicator = communicators.join(communicators.choose(), topology, Meeting(directory), None)
    return Membership(topology, communicator, SINGLE.agree_on_blocks)


def follow(
    directory: Path, number: int, seconds: Sequence[float], near: socket.socket, done: Connection
) -> None:
    """Another rank: follows rank 0, and reports when it was busy."""
    torch.set_num_threads(1)
    place = membership(directory, number, len(seconds))
    runner = FollowerRunner.load(directory / "model", options(len(seconds)), lambda *_: None, place)
    pace = Pace(runner._rank._model, seconds[number])
    try:
        rank.follow(Channel(near), runner)
    except ChannelClosedError:
        done.send(pace.busy)


def limits(stages: int) -> SchedulerConfig:
    """The scheduler's."""
    return SchedulerConfig(
        max_num_seqs=max(STREAMS),
        max_num_batched_tokens=512,
        max_model_len=512,
        num_blocks=BLOCKS,
        block_size=16,
        pipeline_size=stages,
    )


def decode(
    executor: StepExecutor, streams: int, num_tokens: int, clock: Callable[[], float] = time.monotonic
) -> Span:
    """Decode so many streams; the time in which all of them did."""
    scheduler = Scheduler(limits(executor.max_steps_in_flight), eos_token_ids=())
    pipeline = StepPipeline(scheduler, executor)
    counts = dict.fromkeys(map(str, range(streams)), 0)
    for name in counts:
        sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
        scheduler.add(Request(name, (1 + int(name),), sampling, 0.0))
    began = ended = 0.0
    while scheduler.has_work:
        advanced = pipeline.advance()
        for event in advanced[1] if advanced is not None else ():
            counts[event.request_id] += len(event.token_ids)
        if not began and min(counts.values()) >= WARM_TOKENS:
            began = clock()
        if not ended and max(counts.values()) >= num_tokens - WARM_TOKENS:
            ended = clock()
    return began, ended


def utilisation(busy: Sequence[Sequence[Span]], span: Span) -> float:
    """The share of the time that a stage was busy, the mean of all stages."""
    begin, end = span
    shares = [sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans) for spans in busy]
    return statistics.mean(shares) / (end - begin)


def of_rounds(busy: Sequence[Sequence[Span]], span: Span, seconds: float) -> float:
    """The median of the utilisation in every part of so many seconds: a pause of a busy machine changes a
    few parts, and what the pipeline loses is lost in all of them.
    """
    count = int((span[1] - span[0]) / seconds)
    starts = [span[0] + index * seconds for index in range(count)]
    return statistics.median(utilisation(busy, (start, start + seconds)) for start in starts)


def scheduled(seconds: Sequence[float], streams: int, num_tokens: int) -> float:
    """The utilisation by a virtual clock on which nothing but the stages takes time: what the scheduler and
    its slots leave idle, whatever this machine does.
    """
    stages = FakeStages(FakeRunner(limits(len(seconds))), seconds)
    span = decode(stages, streams, num_tokens, lambda: stages.now)
    share: float = stages.utilisation(*span)
    return share


def measure(seconds: Sequence[float], num_tokens: int) -> list[tuple[int, float, float, float]]:
    """(streams, utilisation, the median of rounds, by the formula)."""
    stages, context = len(seconds), multiprocessing.get_context("spawn")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        families.build(directory / "model", "Llama", {"num_hidden_layers": 2 * stages})
        pairs = {number: socket.socketpair() for number in range(1, stages)}
        pipes = {number: context.Pipe() for number in pairs}
        processes = [
            context.Process(target=follow, args=(directory, number, seconds, far, pipes[number][1]))
            for number, (_, far) in pairs.items()
        ]
        for process in processes:
            process.start()
        channels = {number: Channel(near) for number, (near, _) in pairs.items()}
        for _, far in pairs.values():
            far.close()
        place = membership(directory, 0, stages)
        group = RankGroup(channels, deadline=STAGE_DEADLINE)
        runner = ModelRunner.load(
            directory / "model", options(stages), lambda *_: None, ranks=place, followers=group
        )
        pace = Pace(runner._model, seconds[0])
        spans = [decode(runner, streams, num_tokens) for streams in STREAMS]
        for channel in channels.values():
            channel.close()
        busy = [pace.busy, *(near.recv() for near, _ in pipes.values())]
        for process in processes:
            process.join()
    balance = statistics.mean(seconds) / max(seconds)
    return [
        (
            streams,
            utilisation(busy, span),
            of_rounds(busy, span, sum(seconds)),
            min(1.0, streams / stages) * balance,
        )
        for streams, span in zip(STREAMS, spans, strict=True)
    ]


def report(seconds: Sequence[float], num_tokens: int) -> str:
    """A table. The difference is that of the median round to the formula."""
    columns = ["streams", "formula", "by the scheduler", "measured", "median round", "difference in points"]
    rows = []
    for streams, mean, median, formula in measure(seconds, num_tokens):
        shares = (formula, scheduled(seconds, streams, num_tokens), mean, median)
        shown = [f"{share:.1%}" for share in shares]
        rows.append([str(streams), *shown, f"{100 * (median - formula):+.1f}"])
    return table(columns, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[200.0] * 3, help="of each stage")
    parser.add_argument("--tokens", type=int, default=30, help="of each stream")
    arguments = parser.parse_args()
    print(report([one / 1000 for one in arguments.milliseconds], arguments.tokens))


if __name__ == "__main__":
    main()
