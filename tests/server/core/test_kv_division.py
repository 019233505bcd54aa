"""How ranks divide KV blocks: every byte of a block is somewhere, and no two parts are in the same place."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from quire_server.core.kv_division import KVDivision, KVMemory
from quire_server.core.topology import Range


@st.composite
def memories(draw):
    """Tensor sizes divide the heads, or the heads divide them; stages have at least one layer."""
    heads, num_layers = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.integers(1, 7))
    tensor = draw(st.sampled_from([size for size in range(1, 9) if heads % size == 0 or size % heads == 0]))
    cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=3)) if num_layers > 1 else set()
    bounds = [0, *sorted(cuts), num_layers]
    stages = tuple(Range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False))
    division = KVDivision(heads, tensor, stages)
    return KVMemory(division, draw(st.integers(1, 4)), draw(st.integers(1, 50)), draw(st.booleans()))


@given(memories())
def test_the_parts_of_a_block_are_all_its_bytes_once(memory):
    assert sum(run.size for run in memory.runs()) == memory.block_bytes
    assert {run.size % memory.head_bytes for run in memory.runs()} == {0}


@given(memories())
def test_no_two_parts_overlap_and_each_is_within_the_memory_of_its_rank(memory):
    division = memory.division
    parts = [*memory.runs(), *(other for _, others in memory.copies() for other in others)]
    blocks = range(memory.num_blocks)
    places = sorted((run.at(block) for run in parts for block in blocks), key=lambda place: place.start)
    for one, other in zip(places, places[1:], strict=False):
        assert one.stop <= other.start
    starts = [memory.start(rank) for rank in range(division.num_ranks + 1)]
    for place in places:
        assert any(
            first <= place.start and place.stop <= end for first, end in zip(starts, starts[1:], strict=False)
        )
    assert places[-1].stop <= memory.size


@given(memories())
def test_each_rank_has_as_much_as_its_layers_and_heads_need(memory):
    division = memory.division
    sizes = [run.size for run in memory.runs()]
    sizes += [other.size for _, others in memory.copies() for other in others]
    wanted = sum(
        2 * division.layers(rank).size * division.heads(rank).size for rank in range(division.num_ranks)
    )
    assert sum(sizes) == wanted * memory.head_bytes


@given(memories())
def test_in_a_pool_each_rank_has_a_block_in_one_piece(memory):
    pool = dataclasses.replace(memory, is_pool=True)
    parts = [*pool.runs(), *(other for _, others in pool.copies() for other in others)]
    for rank in range(pool.division.num_ranks):
        own = [run for run in parts if pool.start(rank) <= run.offset < pool.start(rank + 1)]
        assert {run.step for run in own} == {sum(run.size for run in own)}
    if pool.division.tensor == 1:
        assert len(pool.runs()) == len(pool.division.stages), "as few pieces as there are"
