"""Ranks of one model in processes that share memory: a replayed step equals one layer by layer."""

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.sampling.largest import largest_reference
from quire_server.core.topology import Topology
from quire_server.layers.parallel import CollectiveError
from quire_server.layers.shared_memory import SharedMemory
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.loader import Checkpoint
from quire_server.runner.recorded_decode import RecordedDecode
from tests.kernels.rank_processes import RankProcesses, rank_processes, where_recorded
from tests.server.models import families
from tests.server.runner.test_recorded_decode import (
    BLOCK,
    MAX_LEN,
    MAX_ROWS,
    SIZES,
    STEPS,
    caches_of,
    step_of,
)

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Ranks differ from the whole model in how int8 weights are rounded: each has its own scales.
TOLERANCE = 0.08


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    settings: dict[str, Any] = SIZES | {"intermediate_size": 256, "tie_word_embeddings": True}
    families.build(made, "Llama", settings | {"initializer_range": 0.1})
    return made


@pytest.fixture(scope="module")
def pair() -> Iterator[RankProcesses]:
    with rank_processes(2, SharedMemory) as made:
        yield made


def open_checkpoint(directory: Path, dtype: str) -> Checkpoint:
    return Checkpoint.open(directory, dtype=dtype, quantization_name="int8")


def shard(communicator: SharedMemory, rank: int, directory: Path, dtype: str) -> Decoder:
    checkpoint = open_checkpoint(directory, dtype)
    return checkpoint.read_shard(Topology(2, rank), communicator, max_len=MAX_LEN, device=CPU)


def by_layers(model: Decoder, caches: tuple[Tensor, ...], number: int) -> Tensor:
    """The logits of one of the steps, over whatever the caches contain."""
    torch.manual_seed(number)
    step, rows = step_of(*STEPS[number])
    layout, config = StepLayout.of(step), model.config
    return model(batch_builder.build(step, layout, rows, config.num_kv_heads, config.windows), caches)


def empty_caches(model: Decoder, dtype: torch.dtype) -> tuple[Tensor, ...]:
    caches = caches_of(model, dtype)
    for cache in caches:
        cache.zero_()
    return caches


def steps_of_a_rank(
    communicator: SharedMemory, pipe: Connection, rank_directory: Path, dtype: str
) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The logits of each step by a replay, compared with the layers', and its exchanges: calls and bytes.
    Then the same replay for the largest of them alone, which takes 8 bytes a position in place of the logits.
    """
    rank = pipe.recv()
    model = shard(communicator, rank, rank_directory, dtype)
    mine = empty_caches(model, DTYPES[dtype])
    static = RecordedDecode.of(model, mine, MAX_ROWS, MAX_LEN // BLOCK)
    assert static is not None
    assert communicator.calls == 0
    results, calls = [], []
    for number, lengths in enumerate(STEPS):
        theirs = tuple(cache.clone() for cache in mine)
        expected = by_layers(model, theirs, number)
        before = communicator.calls, communicator.bytes
        torch.manual_seed(number)
        step, rows = step_of(*lengths)
        results.append(static(StepLayout.of(step), rows).clone())
        calls.append((communicator.calls - before[0], communicator.bytes - before[1]))
        assert torch.equal(results[-1], expected)
        assert all(torch.equal(*caches) for caches in zip(mine, theirs, strict=True))
        before = communicator.calls, communicator.bytes
        largest = static(StepLayout.of(step), rows, only_largest=True)
        assert torch.equal(largest, largest_reference(expected, rank * model.config.vocab_rows))
        sampled, item = len(expected), DTYPES[dtype].itemsize
        without = calls[-1][1] - sampled * model.config.vocab_rows * item
        assert communicator.calls - before[0] == calls[-1][0]
        assert communicator.bytes - before[1] == without + 8 * sampled
    return results, calls


@where_recorded
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_of_ranks_equals_the_layers_one_by_one_and_the_whole_model(
    pair: RankProcesses, directory: Path, dtype: str
) -> None:
    pair.start(steps_of_a_rank, directory, dtype)
    for rank in range(2):
        pair.send(rank, rank)
    (results, calls), (_, others) = (pair.receive(rank) for rank in range(2))
    whole = open_checkpoint(directory, dtype).read(max_len=MAX_LEN, device=CPU, on_progress=lambda *_: None)
    caches = empty_caches(whole, DTYPES[dtype])
    with torch.inference_mode():
        for number, result in enumerate(results):
            expected = by_layers(whole, caches, number).float()
            assert (result - expected).std() < TOLERANCE * expected.std()
    sums, item = 2 * SIZES["num_hidden_layers"] + 1, DTYPES[dtype].itemsize
    summed, gathered = sums * SIZES["hidden_size"] * item, SIZES["vocab_size"] // 2 * item
    assert (
        calls
        == others
        == [(sums + 1, sum(counts) * summed + sum(samples) * gathered) for _, counts, samples in STEPS]
    )


def lonely_replay(communicator: SharedMemory, pipe: Connection, directory: Path) -> None:
    rank = pipe.recv()
    model = shard(communicator, rank, directory, "float32")
    static = RecordedDecode.of(model, caches_of(model, torch.float32), MAX_ROWS, MAX_LEN // BLOCK)
    assert static is not None
    step, rows = step_of(*STEPS[1])
    static(StepLayout.of(step), rows)
    if rank == 0:
        static(StepLayout.of(step), rows)


@where_recorded
def test_a_replay_without_the_other_rank_fails_in_its_first_call(
    pair: RankProcesses, directory: Path
) -> None:
    pair.start(lonely_replay, directory, deadline=5)
    for rank in range(2):
        pair.send(rank, rank)
    error = pair.receive(0)
    assert isinstance(error, CollectiveError)
    assert str(error) == f"Rank 1 did not arrive within 5 s (call {error.call} of rank 0)."
    assert error.call == 2 * SIZES["num_hidden_layers"] + 3
    assert pair.receive(1) is None
