"""What copies of KV blocks came to on all ranks: a block is whole if every rank has its part."""

import random

from quire_server.core.copy_outcomes import CopyOutcomes
from quire_server.core.step import CopyOutcome


def test_a_block_or_a_slot_that_one_rank_has_not_is_not_there():
    outcomes = CopyOutcomes(3)
    combined = outcomes.combine(
        [CopyOutcome(failed=(4, 7), lost=(1,)), CopyOutcome(failed=(7,), lost=(2, 1))]
    )
    assert combined == CopyOutcome(failed=(4, 7), lost=(1, 2))
    assert outcomes.combine([CopyOutcome(disk_failed=True)]) == CopyOutcome(disk_failed=True)
    assert outcomes.combine([]) is None


def test_a_read_from_the_disk_has_ended_when_it_has_on_every_rank():
    outcomes = CopyOutcomes(3)
    assert outcomes.combine([CopyOutcome(arrived=(5, 6))]) is None
    assert outcomes.combine([CopyOutcome(missed=(5,)), CopyOutcome(arrived=(6,))]) is None
    assert outcomes.combine([CopyOutcome(arrived=(6,))]) == CopyOutcome(arrived=(6,))
    assert outcomes.combine([CopyOutcome(arrived=(5,))]) == CopyOutcome(missed=(5,))


def test_a_slot_is_read_into_again_and_again():
    dice, outcomes = random.Random(1), CopyOutcomes(2)
    for _ in range(50):
        fails = [dice.random() < 0.3 for _ in range(2)]
        answers = [CopyOutcome(missed=(9,)) if failed else CopyOutcome(arrived=(9,)) for failed in fails]
        if dice.random() < 0.5:
            assert outcomes.combine([answers[0]]) is None
            answers = answers[1:]
        assert outcomes.combine(answers) == (
            CopyOutcome(missed=(9,)) if any(fails) else CopyOutcome(arrived=(9,))
        )
