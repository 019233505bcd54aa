"""The steps of the warm-up have every size that matters, and every step is one that a runner can execute."""

from itertools import pairwise

import pytest

from quire_server.core.warm_up_steps import sizes, steps


def next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@pytest.mark.parametrize("most", [1, 2, 5, 100, 256, 1000])
def test_the_sizes_have_each_number_of_splits_that_any_size_has(most: int) -> None:
    assert sizes(most)[0] == 1 and sizes(most)[-1] == most
    assert all(after <= 1.5 * before or after <= 2 for before, after in pairwise(sizes(most)))
    for places in range(1, 700):
        found = {next_power(min(max(1, places // size), 32)) for size in range(1, most + 1)}
        assert {next_power(min(max(1, places // size), 32)) for size in sizes(most)} == found


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize(
    ("rows", "tokens", "longest"), [(1, 1, 1), (1, 512, 64), (5, 24, 32), (256, 8192, 9000)]
)
def test_every_step_fits_the_batch(
    rows: int, tokens: int, longest: int, has_graphs: bool, drafts: int
) -> None:
    found = steps(rows, tokens, longest, 16, drafts, has_graphs=has_graphs)
    for step in found:
        assert len(step.rows) <= rows and 0 < step.total_tokens <= tokens
        for row, start, count, samples in zip(
            step.rows, step.starts, step.num_tokens, step.samples, strict=True
        ):
            assert 0 < samples <= count and start + count <= longest
            assert len(step.started[row].block_ids) * 16 >= start + count
    assert max(step.total_tokens for step in found) == min(tokens, rows * longest)
    if rows > 1:
        mixed = [
            step
            for step in found
            if step.samples[0] == step.num_tokens[0] and step.samples[-1] == 1 < step.num_tokens[-1]
        ]
        assert max(step.total_tokens for step in mixed) == min((rows - 1) * (1 + drafts) + 2, tokens)
        assert has_graphs == (
            not any(step.num_tokens == step.samples for step in found if len(step.rows) > 1)
        )
