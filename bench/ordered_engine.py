"""Rank 0 of an engine that runs the batches that a bench orders: `python -m bench.ordered_engine RUN_DIR
COMMUNICATOR MODEL [flags]` (used by ``bench.engine_processes``).

In the place of ``quire_server.engine``: it loads a model and joins the other ranks as that does; in place of
requests from an API process there are orders, lines of JSON on a unix socket.
"""

import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.engine import prompts
from quire_server import config, fault_injection
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.topology import Topology
from quire_server.engine import loading
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.health.heartbeat import Process, SharedState
from quire_server.layers import communicators
from quire_server.layers.parallel import Communicator, Meeting, SingleRank
from quire_server.runner.model_runner import ModelRunner

SOCKET = "orders"
DEFAULT = "default"  # the communicator that the server would choose


def run(runner: ModelRunner, communicator: Communicator, order: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a batch of ``count`` prompts of ``length`` random tokens, with ``new`` tokens each: the
    first computes all prompts. For each its seconds, and what rank 0 exchanged.
    """
    count, length = order["count"], order["length"]
    limits = SchedulerConfig(
        count, length * count, runner.max_model_len, runner.num_blocks, runner.block_size, False
    )
    scheduler = Scheduler(limits, eos_token_ids=())
    for number, prompt in enumerate(prompts(count, count, length, runner.model_config.vocab_size)):
        sampling = SamplingParams(order["new"], temperature=order["temperature"], seed=number)
        scheduler.add(Request(str(number), tuple(prompt), sampling, 0.0))
    steps, start = list[dict[str, Any]](), time.perf_counter()
    calls, sent = communicator.calls, communicator.bytes
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, runner.run(step))
        now = time.perf_counter()
        steps.append({
            "tokens": step.total_tokens,
            "sampled": sum(step.samples),
            "seconds": now - start,
            "calls": communicator.calls - calls,
            "bytes": communicator.bytes - sent,
        })  # fmt: skip
        start, calls, sent = now, communicator.calls, communicator.bytes
    return steps


def main(argv: list[str]) -> None:
    """Load, then answer orders until the bench closes the connection."""
    run_dir, kind = Path(argv[0]), argv[1]
    settings = config.parse_args(argv[2:], os.environ)
    state = SharedState.open(run_dir)
    state.beat_by_thread(Process.ENGINE)
    joined: list[Communicator] = []
    join = communicators.join

    def noted(name: str, topology: Topology, meeting: Meeting, descriptor: int | None) -> Communicator:
        joined.append(join(name, topology, meeting, descriptor))
        return joined[-1]

    communicators.join = noted
    if kind != DEFAULT:
        communicators.choose = lambda nodes=1, *, is_gpu=False: kind
    heartbeat = HeartbeatWriter(state, time.monotonic())
    runner = loading.load(settings, run_dir, heartbeat, fault_injection.parse({}))
    gc.collect()
    gc.freeze()  # as the engine
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(run_dir / SOCKET))
        with connection.makefile("rw") as lines:
            facts = {"threads": torch.get_num_threads(), "replays": runner.can_replay}
            print(json.dumps(facts), file=lines, flush=True)
            for line in lines:
                steps = run(runner, joined[0] if joined else SingleRank(), json.loads(line))
                print(json.dumps(steps), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
