"""The budget of memory for all bodies: who gets a share of it, and that all of it comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_http.body_memory import MEMORY_LIMIT, BodyMemory
from quire_http.body_size import BodySize
from quire_http.errors import ApiError
from quire_http.exchange import MAX_BODY_BYTES


def taken(memory, client, size):
    """A share of this size, None where it is refused."""
    share = memory.share(client)
    try:
        share.grow_to(size)
    except ApiError as error:
        assert (error.status, error.code) == (503, "body_memory")
        assert dict(error.headers)["retry-after"] == "1"
        return None
    return share


def test_one_client_cannot_take_all_and_another_one_has_room():
    memory = BodyMemory(100)
    shares = [share for _ in range(100) if (share := taken(memory, "mallory", 10))]
    assert len(shares) == 5
    assert taken(memory, "alice", 20)
    assert taken(memory, "bob", 1)


def test_long_bodies_do_not_keep_out_small_ones_of_the_same_client_nor_those_another_one():
    memory = BodyMemory(256_000)
    assert len([share for _ in range(100) if (share := taken(memory, "", 32_000))]) == 4
    small = [share for _ in range(1000) if (share := taken(memory, "", 1000))]
    assert len(small) == 64
    assert taken(memory, "bob", 64_000)


def test_a_single_body_may_have_all_that_is_free():
    memory = BodyMemory(100)
    assert (share := taken(memory, "alice", 90))
    assert not taken(memory, "bob", 20)
    share.release()
    assert taken(memory, "bob", 100)


def test_the_greatest_body_fits_whatever_it_holds():
    size = BodySize()
    size.add(b'{"prompt":"\xf0\x9f\x98\x80'.ljust(MAX_BODY_BYTES, b"a"))
    assert taken(BodyMemory(), "alice", size.memory + 64 * (1 << 18))
    assert 8 * MAX_BODY_BYTES < size.memory < MEMORY_LIMIT


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=40))
def test_the_limit_holds_and_everything_comes_back(requests):
    memory, shares = BodyMemory(100), []
    for client, size, ends in requests:
        if (share := taken(memory, client, size)) is not None:
            shares.append(share)
        assert 0 <= memory.in_use <= memory.limit
        if ends and shares:
            shares.pop(0).release()
    for share in shares:
        share.release()
        share.release()  # as often as one likes
    assert memory.in_use == 0 and not memory._by_client


def test_a_share_that_could_not_grow_still_holds_what_it_had():
    memory = BodyMemory(100)
    share = taken(memory, "alice", 40)
    with pytest.raises(ApiError):
        share.grow_to(101)
    assert memory.in_use == 40
    share.release()
    assert memory.in_use == 0
