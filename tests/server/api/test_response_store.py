"""The memory of kept responses."""

import json

from hypothesis import given
from hypothesis import strategies as st

from quire_server.api.response_store import ResponseStore, StoredResponse

ONE = StoredResponse(b"x" * 976, b"[]")  # 2002 bytes as it counts


def stored(length, conversation=b"[]"):
    return StoredResponse(b"x" * length, conversation)


def test_the_least_recently_used_response_is_dropped_first():
    store = ResponseStore(3 * ONE.size)
    for name in "abc":
        store.put("alice", name, ONE)
    assert store.get("alice", "a") is ONE  # used now
    store.put("alice", "d", ONE)
    assert [name for name in "abcd" if store.get("alice", name)] == ["a", "c", "d"]


def test_a_client_that_has_more_than_half_drops_its_own_before_those_of_others():
    store = ResponseStore(4 * ONE.size)
    store.put("bob", "old", ONE)
    for number in range(9):
        store.put("alice", str(number), ONE)
    assert store.get("bob", "old") is ONE
    assert [name for name in map(str, range(9)) if store.get("alice", name)] == ["6", "7", "8"]
    store.put("bob", "new", ONE)
    assert store.get("bob", "old") and store.get("bob", "new") and store.get("alice", "6") is None


def test_a_response_that_is_too_long_is_not_kept_and_drops_no_other():
    store = ResponseStore(2 * ONE.size)
    store.put("alice", "a", ONE)
    store.put("alice", "long", stored(9000))
    assert store.get("alice", "a") is ONE and store.get("alice", "long") is None


def test_a_client_finds_its_own_responses_alone():
    store = ResponseStore()
    store.put("alice", "a", stored(1, json.dumps([{"role": "user", "content": "Hi"}]).encode()))
    assert store.conversation("alice", "a") == [{"role": "user", "content": "Hi"}]
    assert store.conversation("bob", "a") is None and not store.delete("bob", "a")
    assert store.delete("alice", "a") and store.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 5000))))
def test_no_more_is_kept_than_the_bound_and_what_counts_is_what_is_kept(steps):
    store = ResponseStore(10_000)
    for client, name, length in steps:
        if length % 3:
            store.put(client, name, stored(length))
        else:
            store.delete(client, name)
        kept = [store.get(client, name) for client in "ab" for name in "xyz"]
        assert store.num_bytes == sum(one.size for one in kept if one is not None) <= 10_000
