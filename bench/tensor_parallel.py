"""A model of 100 M parameters divided between two ranks with one thread each, beside one process with two
threads (used by ``bench.distributed``).

The engines are processes of their own, as a server has them: rank 0 schedules and samples, another process
runs ``quire_server.engine.rank``. They take turns, so that a disturbance of the machine affects all of them,
and who does not have the turn sleeps.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.compare import table
from bench.engine_processes import EngineLostError, EngineProcesses
from bench.engine_rates import COLUMNS, HEAD, Rates, rates, rows
from bench.ordered_engine import DEFAULT
from quire_server.layers import communicators

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
#: int8 is what a server takes by itself on a CPU with AVX2.
WEIGHTS = {"int8": ("--quantization", "int8"), "float32": ("--quantization", "none", "--dtype", "float32")}
ONE, SHARED, GLOO = "one process, 2 threads", "2 ranks, shared memory", "2 ranks, gloo"
WAYS = {ONE: (1, DEFAULT), SHARED: (2, communicators.SHARED_MEMORY), GLOO: (2, communicators.GLOO)}
ROUNDS = 9


def write_model(directory: Path, model: LlamaConfig) -> None:
    """Random weights in bfloat16."""
    torch.manual_seed(1)
    LlamaForCausalLM(model).to(torch.bfloat16).save_pretrained(directory)


@contextmanager
def engines(model: Path, flags: Sequence[str]) -> Iterator[dict[str, EngineProcesses]]:
    """All of them, loaded."""
    with ExitStack() as stack:
        started = {}
        for name, (ranks, communicator) in WAYS.items():
            engine = stack.enter_context(
                EngineProcesses(
                    model, (*FLAGS, *flags), ranks=ranks, threads=THREADS, communicator=communicator
                )
            )
            threads = engine.facts["threads"]
            if threads != THREADS // ranks:
                raise EngineLostError(f"{name}: a rank has {threads} threads")
            started[name] = engine
        yield started


NOTES = (
    "Ratios: the median of those within the rounds, and in parentheses that of the fastest steps. Where "
    "other work has the cores, threads of one process lose whole slices of time at each barrier of OpenMP, "
    "ranks less: only with a load average below 2 do the medians compare the engines alone."
)


def tensor_parallel(flags: Sequence[str], model: LlamaConfig = MODEL, rounds: int = ROUNDS) -> str:
    """Tokens per second of each engine, and the ratios to one process. ``flags``: of the servers."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model)
        with engines(Path(folder), flags) as started:
            found, load = rates(started, rounds)
    lines = rows(found)
    for name in (SHARED, GLOO):
        pairs = [(found[name][column], found[ONE][column]) for column in COLUMNS]
        lines.append([f"{name} / one process", *(_ratio(*pair) for pair in pairs)])
    return f"{table([HEAD, *COLUMNS], lines)}\n\n{NOTES} {load}"


def _ratio(ours: Rates, base: Rates) -> str:
    ratios = [one / other for one, other in zip(ours.rounds, base.rounds, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({ours.best / base.best:.2f}x)"
