"""A watch is stale when it does not report in time what a re-list found, and never otherwise."""

from __future__ import annotations

from quire_operator.watch_health import WatchHealth

KIND = "Pod"
PATIENCE = 10.0


def test_what_a_list_finds_and_no_watch_reports_makes_it_stale_until_it_is_reported() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    assert watches.stale == [], "the event may be on its way"
    assert watches.has_unconfirmed
    watches.on_relist(KIND, [], {"a": 5}, 10)
    assert watches.stale == [KIND]

    watches.on_event(KIND, "a", 6)
    assert watches.stale == [] and not watches.has_unconfirmed, "before the next list"


def test_lists_that_follow_each_other_closely_prove_nothing() -> None:
    """Each watch that was interrupted brings one on, while another has not begun again."""
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    for now in range(1, 10):
        watches.on_relist(KIND, [], {"a": 5}, now)
        assert watches.stale == [] and watches.has_unconfirmed
    watches.on_relist(KIND, [], {"a": 5}, 10)
    assert watches.stale == [KIND], "since the first of them"


def test_a_silent_watch_is_found_although_the_object_changes_before_every_list() -> None:
    watches = WatchHealth(PATIENCE)
    for now in range(11):
        watches.on_relist(KIND, ["a"], {"a": 5 + now}, now)
    assert watches.stale == [KIND]


def test_what_is_reported_before_or_while_it_is_listed_is_in_no_doubt() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_event(KIND, "a", 5)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    assert not watches.has_unconfirmed
    watches.on_relist(KIND, [], {"a": 5}, 10)
    assert watches.stale == []


def test_news_that_follows_reported_news_is_waited_for_anew() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    watches.on_event(KIND, "a", 5)
    watches.on_relist(KIND, ["a"], {"a": 9}, 10)
    assert watches.stale == [], "its event may be on its way"
    watches.on_relist(KIND, [], {"a": 9}, 20)
    assert watches.stale == [KIND]


def test_what_is_gone_meanwhile_and_what_was_found_before_the_watches_began_prove_nothing() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    watches.on_relist(KIND, [], {}, 10)
    assert watches.stale == []

    watches.on_relist(KIND, ["b"], {"b": 7}, 20)
    watches.reset()
    watches.on_relist(KIND, ["b"], {"b": 7}, 30)
    assert watches.stale == []


def test_a_watch_that_reports_a_deletion_is_not_silent_and_has_nothing_left_to_report() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_event(KIND, "a", 5)
    for now in (0, 10):
        watches.on_relist(KIND, ["b"], {"a": 5, "b": 6}, now)
    assert watches.has_unconfirmed and watches.stale == [KIND]
    for uid in "ab":
        watches.on_delete(KIND, uid)

    assert not watches.has_unconfirmed and watches.stale == []
    assert not watches.has_seen(KIND, "a")


def test_one_silent_watch_says_nothing_of_the_others() -> None:
    watches = WatchHealth(PATIENCE)
    for now in (0, 10):
        watches.on_relist("Pod", ["a"], {"a": 5}, now)
        watches.on_relist("Service", [], {"s": 1}, now)
    assert watches.stale == ["Pod"]
