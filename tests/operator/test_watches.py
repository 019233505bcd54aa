"""A watch is stale when it has not told by the next list what the last one found without it; else never."""

from __future__ import annotations

from quire_operator.watches import Watches

KIND = "Pod"


def test_what_two_lists_find_and_no_watch_tells_makes_it_stale_until_it_is_told() -> None:
    watches = Watches()
    assert not watches.listed(KIND, ["a"], {"a": 5}), "the event may be on its way"
    assert watches.in_doubt
    assert watches.listed(KIND, [], {"a": 5})
    assert watches.stale == [KIND]

    watches.told(KIND, "a", 6)
    assert not watches.listed(KIND, [], {"a": 6})
    assert watches.stale == [] and not watches.in_doubt


def test_what_is_told_before_or_while_it_is_listed_is_in_no_doubt() -> None:
    watches = Watches()
    watches.told(KIND, "a", 5)
    assert not watches.listed(KIND, ["a"], {"a": 5})
    assert not watches.in_doubt
    assert not watches.listed(KIND, [], {"a": 5})


def test_news_that_follows_told_news_is_waited_for_anew() -> None:
    watches = Watches()
    watches.listed(KIND, ["a"], {"a": 5})
    watches.told(KIND, "a", 5)
    assert not watches.listed(KIND, ["a"], {"a": 9}), "its event may be on its way"
    assert watches.listed(KIND, [], {"a": 9})


def test_what_is_gone_meanwhile_and_what_was_found_before_the_watches_began_prove_nothing() -> None:
    watches = Watches()
    watches.listed(KIND, ["a"], {"a": 5})
    assert not watches.listed(KIND, [], {})

    watches.listed(KIND, ["b"], {"b": 7})
    watches.restarted()
    assert not watches.listed(KIND, ["b"], {"b": 7})


def test_a_watch_that_tells_of_a_deletion_is_not_silent_and_has_nothing_left_to_tell() -> None:
    watches = Watches()
    watches.told(KIND, "a", 5)
    watches.listed(KIND, ["b"], {"a": 5, "b": 6})
    assert watches.in_doubt
    for uid in "ab":
        watches.told_gone(KIND, uid)

    assert not watches.in_doubt
    assert not watches.has_told(KIND, "a")


def test_one_silent_watch_says_nothing_of_the_others() -> None:
    watches = Watches()
    for _ in range(2):
        watches.listed("Pod", ["a"], {"a": 5})
        watches.listed("Service", [], {"s": 1})
    assert watches.stale == ["Pod"]
