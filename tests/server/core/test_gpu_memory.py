"""The size of the KV cache, and the remedy in the error where it does not fit."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.core.gpu_memory import KVCacheRequirements, MemoryUsage, graph_bytes, num_blocks
from quire_server.errors import ConfigError

GIB, MIB = 1 << 30, 1 << 20
ROOMY = MemoryUsage(total=80 * GIB, others=GIB, weights=16 * GIB, workspace=2 * GIB, graphs=GIB)
BLOCK = KVCacheRequirements(block_bytes=2 * MIB, block_size=16, longest=8192, useful_blocks=1 << 20)


def test_the_cache_gets_the_rest_of_the_memory_share() -> None:
    assert num_blocks(ROOMY, 0.9, BLOCK) == (72 - 20) * 1024 // 2
    assert num_blocks(ROOMY, 0.5, BLOCK) == (40 - 20) * 1024 // 2


def test_blocks_that_no_request_could_use_are_not_allocated() -> None:
    assert num_blocks(ROOMY, 0.9, replace(BLOCK, useful_blocks=700)) == 700


def error_text(measured: MemoryUsage, utilization: float, wanted: KVCacheRequirements) -> str:
    with pytest.raises(ConfigError) as caught:
        num_blocks(measured, utilization, wanted)
    return str(caught.value)


def test_the_error_names_what_uses_the_memory_and_how_much_is_missing() -> None:
    message = error_text(ROOMY, 0.25, BLOCK)
    for part in ("needs 1024 MiB", "lacks 1024 MiB", "weights take 16384", "a step 2048", "graphs 1024"):
        assert part in message


@given(st.floats(0.1, 0.98), st.integers(1, 90 * GIB), st.integers(0, 20 * GIB), st.integers(1, 200_000))
def test_the_change_that_the_error_proposes_is_sufficient(
    utilization: float, weights: int, workspace: int, longest: int
) -> None:
    measured = replace(ROOMY, weights=weights, workspace=workspace)
    wanted = replace(BLOCK, longest=longest)
    try:
        assert num_blocks(measured, utilization, wanted) * wanted.block_size >= longest
        return
    except ConfigError as error:
        message = str(error)
    if share := re.search(r"--gpu-memory-utilization to ([0-9.]+)\.$", message):
        assert num_blocks(measured, float(share[1]), wanted)
    elif length := re.search(r"--max-model-len to (\d+)", message):
        assert num_blocks(measured, utilization, replace(wanted, longest=int(length[1])))
    elif "--enforce-eager" in message:
        assert num_blocks(replace(measured, graphs=0), utilization, wanted)
    elif "--max-num-batched-tokens" in message:
        assert num_blocks(replace(measured, workspace=1), utilization, wanted)
    elif "End what else" in message:
        assert num_blocks(replace(measured, others=0), utilization, wanted)
    else:
        size = re.search(r"a GPU with (\d+) GiB", message)
        assert size is not None
        assert num_blocks(replace(measured, total=int(size[1]) * GIB), 0.98, wanted)


def test_proposals_are_a_larger_share_then_a_shorter_context_then_a_larger_gpu() -> None:
    assert "Raise --gpu-memory-utilization to 0.27." in error_text(ROOMY, 0.25, BLOCK)
    assert "Lower --max-model-len to 8128." in error_text(
        replace(ROOMY, total=21 * GIB - 8 * MIB), 1.0, BLOCK
    )
    assert "Take a GPU with" in error_text(replace(ROOMY, weights=90 * GIB), 0.9, BLOCK)


def test_graphs_share_the_memory_of_the_largest_and_keep_logits_of_their_own() -> None:
    each = 4 * 128_256
    assert graph_bytes(900 * MIB, [(64, 1)], each) == (900 + 32) * MIB
    drafted = [(64, 5), (64, 1), (8, 5), (8, 1), (1, 5), (1, 1)]
    others = 64 + 40 + 8 + 5 + 1
    assert graph_bytes(900 * MIB, drafted, each) == (900 + 6 * 32) * MIB + others * each
