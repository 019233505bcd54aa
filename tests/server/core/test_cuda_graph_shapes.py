"""Every decode batch fits into a captured graph that is not much larger."""

import pytest

from quire_server.core.cuda_graph_shapes import eager_shape, is_small, is_uniform, shape_for, shapes, sizes
from quire_server.core.step import Step


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 7, 16, 20, 100, 256, 257, 300, 512, 4096])
def test_each_batch_fits_a_graph_that_wastes_at_most_half_and_the_largest_comes_first(max_rows: int) -> None:
    captured = sizes(max_rows)
    assert captured == tuple(sorted(set(captured), reverse=True))
    assert captured[0] == min(max_rows, 512)
    for count in range(1, captured[0] + 1):
        shape = shape_for((1,) * count, shapes(max_rows, 0))
        assert shape is not None and shape[1] == 1
        size = shape[0]
        assert count <= size <= max(2 * count - 1, count + 63, 1)
        assert size < 2 * count or count == 1


def test_a_batch_larger_than_all_graphs_or_without_a_graph_is_computed_eagerly() -> None:
    assert shape_for((1,) * 513, shapes(4096, 0)) is None
    assert shape_for((1,), ()) is None
    assert shape_for((3,), shapes(2, 0)) is None


def test_without_a_graph_there_are_two_numbers_of_tokens_a_sequence_whatever_was_drafted() -> None:
    assert eager_shape((1, 1), 2) == (2, 1) and eager_shape((3, 3), 2) == (2, 3)
    assert eager_shape((3, 1), 2) == (4, 1) and eager_shape((2, 2), 2) == (4, 1)
    assert eager_shape((3, 3, 2), 2) == (8, 1), "no padding"
    assert eager_shape((5,), 0) == (5, 1)


def test_drafts_are_verified_in_one_graph_unless_it_would_be_mostly_padding() -> None:
    captured = shapes(32, 4)
    tokens = [sequences * tokens for sequences, tokens in captured]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] == 32 * 5
    assert shape_for((5,) * 32, captured) == (32, 5)
    assert shape_for((5, 4, 5, 3), captured) == (4, 5)
    assert shape_for((5,), captured) == (1, 5)
    assert shape_for((5, 1, 1, 1, 1, 1, 1, 1), captured) == (12, 1)
    assert shape_for((2, 2), captured) == (4, 1)
    assert max(sequences * tokens for sequences, tokens in shapes(512, 15)) == 512


def step(num_tokens: tuple[int, ...], samples: tuple[int, ...], starts: tuple[int, ...] = ()) -> Step:
    rows = tuple(range(len(num_tokens)))
    return Step(1, (), (), rows, starts or (0,) * len(rows), num_tokens, samples)


def test_decodes_and_drafts_are_uniform_and_prompts_are_not() -> None:
    assert is_uniform(step((1, 1), (1, 1)))
    assert is_uniform(step((1, 4), (1, 4)))
    assert not is_uniform(step((1, 5), (1, 1)))
    assert not is_uniform(step((1,), (0,)))
    assert not is_uniform(step((), ()))


def test_a_step_with_prompts_is_small_where_their_tokens_together_read_few_keys() -> None:
    assert is_small(step((1, 256), (1, 1))) and is_small(step((300,), (0,)))
    assert not is_small(step((362,), (1,))), "65,703 keys"
    assert is_small(step((1, 8), (1, 1), (100_000, 8_000))), "decodes read theirs in any case"
    assert not is_small(step((1, 9), (1, 1), (0, 8_000)))
    assert not is_small(step((1,) * 512 + (5,), (1,) * 513)) and not is_small(step((), ()))
