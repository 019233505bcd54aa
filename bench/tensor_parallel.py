"""A model of 100 M parameters divided between two ranks with one thread each, beside one process with two
threads (used by ``bench.distributed``).

The engines are processes of their own, as a server has them: rank 0 schedules and samples, another process
runs ``quire_server.engine.rank``. They take turns, so that a disturbance of the machine affects all of them,
and who does not have the turn sleeps.
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.compare import table
from bench.engine import prompts, request
from quire_server import config, fault_injection
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.engine import loading
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.health.heartbeat import SharedState
from quire_server.layers import communicators
from quire_server.runner.model_runner import ModelRunner

THREADS = 2  # of all ranks together
VOCAB_SIZE = 32_000
#: 100 M parameters: 25 M of the embedding, which is also the head, and 12 layers of 6.3 M.
MODEL = LlamaConfig(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)
FLAGS = ("--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--num-gpu-blocks-override", "1024")
ONE, SHARED, GLOO = "one process, 2 threads", "2 ranks, shared memory", "2 ranks, gloo"
WAYS = {ONE: (1, None), SHARED: (2, communicators.SHARED_MEMORY), GLOO: (2, communicators.GLOO)}
ROUNDS, NEW_TOKENS, PROMPT = 9, 33, 128
DECODES, PREFILL = (1, 8, 32), 512


def write_model(directory: Path) -> None:
    """Random weights in bfloat16."""
    torch.manual_seed(1)
    LlamaForCausalLM(MODEL).to(torch.bfloat16).save_pretrained(directory)


def serve(model: Path, size: int, communicator: str | None, orders: Connection) -> None:
    """One engine: for each (length of prompts, how many), seconds of the prefill and of each decode step."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        run_dir, arguments = Path(folder), [str(model), *FLAGS, "--tensor-parallel-size", str(size)]
        state = SharedState.create(run_dir)
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "quire_server.engine.rank", str(rank), folder, *arguments]
            )
            for rank in range(1, size)
        ]
        if communicator is not None:
            communicators.choose = lambda nodes=1, *, is_gpu=False: communicator
        settings, heartbeat = (
            config.parse_args(arguments, os.environ),
            HeartbeatWriter(state, time.monotonic()),
        )
        runner = loading.load(settings, run_dir, heartbeat, fault_injection.parse({}))
        orders.send(torch.get_num_threads())
        while (order := orders.recv()) is not None:
            orders.send(run(runner, *order))
        for other in others:
            other.kill()
            other.wait()


def run(runner: ModelRunner, length: int, count: int) -> tuple[float, list[float]]:
    """(seconds of the prefill, of each step in which all requests decode)."""
    limits = SchedulerConfig(
        count, length * count, runner.max_model_len, runner.num_blocks, runner.block_size, False
    )
    scheduler = Scheduler(limits, eos_token_ids=())
    for number, prompt in enumerate(prompts(count, count, length, VOCAB_SIZE)):
        scheduler.add(request(number, prompt, NEW_TOKENS))
    steps, start = list[float](), time.perf_counter()
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, runner.run(step))
        now = time.perf_counter()
        steps.append(now - start)
        start = now
    return steps[0], steps[1:]


@contextmanager
def engines(model: Path) -> Iterator[dict[str, Connection]]:
    """All of them, loaded."""
    context = multiprocessing.get_context("spawn")
    started = {}
    os.environ["GOMP_SPINCOUNT"] = "10000"  # as the supervisor
    for name, (size, communicator) in WAYS.items():
        os.environ["OMP_NUM_THREADS"] = str(THREADS // size)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(model, size, communicator, theirs))
        process.start()
        threads = ours.recv()
        assert threads == THREADS // size, f"{name} has {threads} threads"
        started[name] = (process, ours)
    yield {name: orders for name, (_, orders) in started.items()}
    for process, orders in started.values():
        orders.send(None)
        process.join()


def tensor_parallel() -> str:
    """Tokens per second of each engine, and the ratios to one process within the rounds."""
    columns = {f"decode x{count}": (PROMPT, count) for count in DECODES} | {
        f"prefill {PREFILL}": (PREFILL, 1)
    }
    rates: dict[str, dict[str, list[float]]] = {name: {column: [] for column in columns} for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with engines(Path(folder)) as started:
            for _ in range(ROUNDS):
                for column, (length, count) in columns.items():
                    for name, orders in started.items():
                        orders.send((length, count))
                        prefill, steps = orders.recv()
                        is_prefill = length == PREFILL
                        rate = length / prefill if is_prefill else count / statistics.median(steps)
                        rates[name][column].append(rate)
    rows = [
        [name, *(f"{statistics.median(found[column]):.0f}" for column in columns)]
        for name, found in rates.items()
    ]
    for name in (SHARED, GLOO):
        ratios = [
            [ours / base for ours, base in zip(rates[name][column], rates[ONE][column], strict=True)]
            for column in columns
        ]
        cells = (f"{statistics.median(each):.2f}x ({min(each):.2f} to {max(each):.2f})" for each in ratios)
        rows.append([f"{name} / one process", *cells])
    return table(["tokens per second", *columns], rows)
