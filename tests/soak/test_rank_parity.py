"""The parity protocol of ranks in its long form: 256 tokens of each answer, all sizes and conditions."""

import logging
from pathlib import Path

import pytest

from tests.server.models import families, rank_parity
from tests.server.models.rank_parity import MODELS, PROMPTS, Compared, Reference
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
    for name, (prefix, settings, sizes) in MODELS.items():
        directory = tmp_path / name
        families.build(directory, prefix, dict(settings))
        reference = Reference.of(rank_parity.whole(directory), PROMPTS, LENGTH)
        for size in sizes:
            found += compare(reference, rank_parity.divided(directory, size), f"{name} on {size}")
    assert found.positions > 40_000
    assert found.ties * 10_000 < found.positions


def test_smollm2_on_three_ranks_gives_the_greedy_tokens_of_one(smollm2: Path) -> None:
    options = {"max_model_len": 512, "num_blocks_override": 128}
    reference = Reference.of(rank_parity.whole(smollm2, **options), SMOLLM2_PROMPTS, LENGTH)
    found = compare(reference, rank_parity.divided(smollm2, 3, **options), "SmolLM2 on 3")
    assert found.positions > 3000
    assert found.ties <= 1
