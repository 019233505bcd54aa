"""The parity protocol of ranks in its short form: some tokens, all models and conditions. `make soak` runs
the long form.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.models import families, rank_parity
from tests.server.models.rank_parity import MODELS, PROMPTS, SMOLLM2, Compared, Reference
from tests.server.runner.ranks_in_process import Ranks

LENGTH = 24
SMOLLM2_PROMPTS = [
    [(31 * index * index + 17 * number) % 40_000 for index in range(20)] for number in range(3)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """A model's directory and its answers on one rank; each is made once."""
    made: dict[str, tuple[Path, Reference]] = {}

    def get(name: str) -> tuple[Path, Reference]:
        if name not in made:
            directory = tmp_path_factory.mktemp("model")
            prefix, settings, _ = MODELS[name]
            families.build(directory, prefix, dict(settings))
            made[name] = directory, Reference.of(rank_parity.whole(directory), PROMPTS, LENGTH)
        return made[name]

    return get


@pytest.fixture(
    scope="module",
    params=[(name, sizes) for name, (*_, divided) in MODELS.items() for sizes in divided],
    ids=lambda each: f"{each[0]} on {each[1][0]} x {each[1][1]}",
)
def ranks(
    model: Callable[[str], tuple[Path, Reference]], request: pytest.FixtureRequest
) -> Iterator[tuple[Ranks, Reference]]:
    name, sizes = request.param
    directory, reference = model(name)
    found = rank_parity.divided(directory, sizes)
    yield found, reference
    found.close()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("condition", rank_parity.conditions(100))
def test_ranks_give_the_greedy_tokens_of_one_rank(ranks: tuple[Ranks, Reference], condition: str) -> None:
    found, reference = ranks
    assert len({token for answer in reference.answers for token in answer}) > 20, "too uniform"
    assert rank_parity.check(reference, found, condition).ties == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sizes", SMOLLM2, ids=lambda sizes: f"{sizes[0]} x {sizes[1]}")
def test_smollm2_on_ranks_and_stages_gives_the_greedy_tokens_of_one(
    smollm2: Path, sizes: rank_parity.Sizes
) -> None:
    options = {"max_model_len": 64, "num_blocks_override": 64}
    reference = Reference.of(rank_parity.whole(smollm2, **options), SMOLLM2_PROMPTS, 6)
    ranks = rank_parity.divided(smollm2, sizes, **options)
    assert rank_parity.check(reference, ranks, "mixed batches").ties == 0
    ranks.close()


def test_only_tokens_that_are_as_good_as_equally_likely_may_change_places() -> None:
    reference = Reference([[1], [2]], [[5, 6, 7], [8, 9, 4]], [[2.0, 5e-4, 1.0], [1.0, 1.0, 0.2]])
    assert reference.compare([[5, 6, 7], [8, 9, 4]]) == Compared(6, 0)
    assert reference.compare([[5, 3, 3], [8, 9, 4]]) == Compared(5, 1)
    with pytest.raises(AssertionError, match=r"at 2, where the margin is 0\.2"):
        reference.compare([[5, 6, 7], [8, 9, 3]])
