"""Holds and states of transfers: what a reference may name, and when blocks are free again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.core.transfer import (
    TRANSFERS,
    Holds,
    HoldState,
    TransferError,
    TransferState,
    changed,
    prefix_blocks,
    prefix_digest,
    read_seconds,
)

INCARNATION, OTHER = b"i" * 16, b"o" * 16
PREFIX = prefix_digest(range(16), "salt", 8)
LEASE = 30.0


def held(now=0.0, blocks=(4, 7)):
    holds = Holds(INCARNATION, LEASE)
    return holds, holds.add(b"g" * 16, PREFIX, blocks, now)


def test_a_reference_names_its_blocks_until_they_were_read_once():
    holds, reference = held()
    assert holds.readable(reference, 0, 1.0) == (4, 7)
    assert holds.readable(reference, 1, 1.0) == (7,)
    holds.confirm(reference, 1.0)
    for use in (lambda: holds.readable(reference, 0, 1.0), lambda: holds.confirm(reference, 1.0)):
        with pytest.raises(TransferError, match="no longer held"):
            use()
    assert [(hold.block_ids, hold.state) for hold in holds.take_ended(1.0)] == [((4, 7), HoldState.READ)]
    assert holds.take_ended(1.0) == [], "blocks are freed once"


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": OTHER},
        {"generation": OTHER},
        {"prefix": prefix_digest(range(16), "another key's salt", 8)},
        {"prefix": prefix_digest(range(1, 17), "salt", 8)},
        {"num_blocks": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_reference_with_another_part_names_nothing(change):
    holds, reference = held()
    with pytest.raises(TransferError):
        holds.readable(reference._replace(**change), 0, 1.0)
    assert holds.readable(reference, 0, 1.0) == (4, 7)


@pytest.mark.parametrize("first", [-1, 2, 1 << 31])
def test_blocks_out_of_range_are_refused(first):
    holds, reference = held()
    with pytest.raises(TransferError, match="no such blocks"):
        holds.readable(reference, first, 1.0)


def test_a_lease_that_ends_while_blocks_are_read_is_not_confirmed():
    holds, reference = held()
    assert holds.readable(reference, 0, LEASE - 0.1)
    with pytest.raises(TransferError, match="no longer held"):
        holds.confirm(reference, LEASE)
    assert [hold.state for hold in holds.take_ended(LEASE)] == [HoldState.EXPIRED]
    with pytest.raises(TransferError, match="nothing is held"):
        holds.readable(reference, 0, LEASE)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "read", "cancel", "sweep"]), st.floats(0, 40)), max_size=60)
)
def test_every_hold_ends_once_and_is_never_readable_after_its_lease(script):
    holds, now, live, freed = Holds(INCARNATION, LEASE), 0.0, {}, []
    for number, (action, seconds) in enumerate(script):
        now += seconds
        if action == "add":
            reference = holds.add(number.to_bytes(16, "big"), PREFIX, (number,), now)
            live[reference] = now
        elif action == "sweep":
            freed += [hold.block_ids[0] for hold in holds.take_ended(now)]
        elif live:
            reference, since = next(iter(live.items()))
            del live[reference]
            if action == "cancel":
                holds.cancel(reference.generation)
            elif now - since >= LEASE:
                with pytest.raises(TransferError):
                    holds.readable(reference, 0, now)
            else:
                holds.confirm(reference, now)
    freed += [hold.block_ids[0] for hold in holds.take_ended(now + LEASE)]
    assert sorted(freed) == [number for number, (action, _) in enumerate(script) if action == "add"]
    assert len(holds) == 0


def test_no_state_leads_back_from_local_prefill_to_a_transfer():
    assert not TRANSFERS[TransferState.LOCAL_PREFILL]
    with pytest.raises(AssertionError):
        changed(TransferState.LOCAL_PREFILL, TransferState.READING)
    assert TransferState.RUNNING not in TRANSFERS[TransferState.READING], "unverified blocks never run"
    assert TransferState.FREED not in TRANSFERS[TransferState.READING], "blocks stay while they are read"


def test_the_last_token_is_never_part_of_the_prefix():
    assert [prefix_blocks(tokens, 8) for tokens in (1, 8, 9, 16, 17)] == [0, 0, 1, 1, 2]


def test_the_deadline_of_a_read_grows_with_its_bytes():
    assert read_seconds(0) == 2.0
    assert read_seconds(10**9) == 12.0
