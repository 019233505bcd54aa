"""Every decode batch has a graph that is hardly larger than itself."""

import pytest

from quire_server.core.graph_buckets import is_uniform, size_for, sizes
from quire_server.core.step import Step


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 7, 16, 20, 100, 256, 257, 300, 512, 4096])
def test_each_batch_fits_a_graph_that_wastes_at_most_half_and_the_largest_comes_first(max_rows: int) -> None:
    captured = sizes(max_rows)
    assert captured == tuple(sorted(set(captured), reverse=True))
    assert captured[0] == min(max_rows, 512)
    for count in range(1, captured[0] + 1):
        size = size_for(count, captured)
        assert size is not None and count <= size <= max(2 * count - 1, count + 63, 1)
        assert size < 2 * count or count == 1


def test_what_is_larger_than_all_graphs_and_what_was_never_captured_is_computed_eagerly() -> None:
    assert size_for(513, sizes(4096)) is None
    assert size_for(1, ()) is None


def step(num_tokens: tuple[int, ...], samples: tuple[int, ...]) -> Step:
    rows = tuple(range(len(num_tokens)))
    return Step(1, (), (), rows, (0,) * len(rows), num_tokens, samples)


def test_decodes_and_drafts_are_uniform_and_prompts_are_not() -> None:
    assert is_uniform(step((1, 1), (1, 1)))
    assert is_uniform(step((1, 4), (1, 4)))
    assert not is_uniform(step((1, 5), (1, 1)))
    assert not is_uniform(step((1,), (0,)))
    assert not is_uniform(step((), ()))
