"""A watch is stale when it does not tell in time what a list found without it; else never."""

from __future__ import annotations

from quire_operator.watches import Watches

KIND = "Pod"
PATIENCE = 10.0


def test_what_a_list_finds_and_no_watch_tells_makes_it_stale_until_it_is_told() -> None:
    watches = Watches(PATIENCE)
    watches.listed(KIND, ["a"], {"a": 5}, 0)
    assert watches.stale == [], "the event may be on its way"
    assert watches.in_doubt
    watches.listed(KIND, [], {"a": 5}, 10)
    assert watches.stale == [KIND]

    watches.told(KIND, "a", 6)
    assert watches.stale == [] and not watches.in_doubt, "before the next list"


def test_lists_that_follow_each_other_closely_prove_nothing() -> None:
    """Each watch that was interrupted brings one on, while another has not begun again."""
    watches = Watches(PATIENCE)
    watches.listed(KIND, ["a"], {"a": 5}, 0)
    for now in range(1, 10):
        watches.listed(KIND, [], {"a": 5}, now)
        assert watches.stale == [] and watches.in_doubt
    watches.listed(KIND, [], {"a": 5}, 10)
    assert watches.stale == [KIND], "since the first of them"


def test_a_silent_watch_is_found_although_the_object_changes_before_every_list() -> None:
    watches = Watches(PATIENCE)
    for now in range(11):
        watches.listed(KIND, ["a"], {"a": 5 + now}, now)
    assert watches.stale == [KIND]


def test_what_is_told_before_or_while_it_is_listed_is_in_no_doubt() -> None:
    watches = Watches(PATIENCE)
    watches.told(KIND, "a", 5)
    watches.listed(KIND, ["a"], {"a": 5}, 0)
    assert not watches.in_doubt
    watches.listed(KIND, [], {"a": 5}, 10)
    assert watches.stale == []


def test_news_that_follows_told_news_is_waited_for_anew() -> None:
    watches = Watches(PATIENCE)
    watches.listed(KIND, ["a"], {"a": 5}, 0)
    watches.told(KIND, "a", 5)
    watches.listed(KIND, ["a"], {"a": 9}, 10)
    assert watches.stale == [], "its event may be on its way"
    watches.listed(KIND, [], {"a": 9}, 20)
    assert watches.stale == [KIND]


def test_what_is_gone_meanwhile_and_what_was_found_before_the_watches_began_prove_nothing() -> None:
    watches = Watches(PATIENCE)
    watches.listed(KIND, ["a"], {"a": 5}, 0)
    watches.listed(KIND, [], {}, 10)
    assert watches.stale == []

    watches.listed(KIND, ["b"], {"b": 7}, 20)
    watches.restarted()
    watches.listed(KIND, ["b"], {"b": 7}, 30)
    assert watches.stale == []


def test_a_watch_that_tells_of_a_deletion_is_not_silent_and_has_nothing_left_to_tell() -> None:
    watches = Watches(PATIENCE)
    watches.told(KIND, "a", 5)
    for now in (0, 10):
        watches.listed(KIND, ["b"], {"a": 5, "b": 6}, now)
    assert watches.in_doubt and watches.stale == [KIND]
    for uid in "ab":
        watches.told_gone(KIND, uid)

    assert not watches.in_doubt and watches.stale == []
    assert not watches.has_told(KIND, "a")


def test_one_silent_watch_says_nothing_of_the_others() -> None:
    watches = Watches(PATIENCE)
    for now in (0, 10):
        watches.listed("Pod", ["a"], {"a": 5}, now)
        watches.listed("Service", [], {"s": 1}, now)
    assert watches.stale == ["Pod"]
