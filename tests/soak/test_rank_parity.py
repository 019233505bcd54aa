"""The parity protocol of ranks in its long form: 256 tokens of each answer, all sizes and conditions."""

import logging
from pathlib import Path

import pytest

from tests.server.models import families, rank_parity
from tests.server.models.rank_parity import MODELS, PROMPTS, SMOLLM2, Compared, Reference
from tests.server.runner.ranks_in_process import Ranks

logger = logging.getLogger(__name__)

LENGTH = 256
SMOLLM2_PROMPTS = [[(31 * index * index + 17 * number) % 40_000 for index in range(20 + 30 * number)]
                   for number in range(3)]  # fmt: skip
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def compare(reference: Reference, ranks: Ranks, name: str) -> Compared:
    """Under all conditions."""
    found = Compared()
    for condition in rank_parity.conditions(0):
        one = rank_parity.check(reference, ranks, condition)
        logger.info("%s, %s: %d positions, %d ties", name, condition, one.positions, one.ties)
        found += one
    ranks.close()
    return found


def test_ranks_give_the_greedy_tokens_of_one_rank(tmp_path: Path) -> None:
    found = Compared()
    for name, (prefix, settings, divided) in MODELS.items():
        directory = tmp_path / name
        families.build(directory, prefix, dict(settings))
        reference = Reference.of(rank_parity.whole(directory), PROMPTS, LENGTH)
        for sizes in divided:
            found += compare(reference, rank_parity.divided(directory, sizes), f"{name} on {sizes}")
    assert found.positions > 40_000
    assert found.ties * 10_000 < found.positions


@pytest.mark.parametrize("sizes", SMOLLM2, ids=lambda sizes: f"{sizes[0]} x {sizes[1]}")
def test_smollm2_on_ranks_and_stages_gives_the_greedy_tokens_of_one(
    smollm2: Path, sizes: rank_parity.Sizes
) -> None:
    options = {"max_model_len": 512, "num_blocks_override": 128}
    reference = Reference.of(rank_parity.whole(smollm2, **options), SMOLLM2_PROMPTS, LENGTH)
    found = compare(reference, rank_parity.divided(smollm2, sizes, **options), f"SmolLM2 on {sizes}")
    assert found.positions > 3000
    assert found.ties <= 1
