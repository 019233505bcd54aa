"""A watch is stale when it does not report in time what a re-list found, and never otherwise."""

from __future__ import annotations

from quire_operator.watch_health import WatchHealth

KIND = "Pod"
PATIENCE = 10.0


def test_a_watch_is_stale_until_it_reports_the_change_that_a_relist_found() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    assert watches.stale == [], "the event may be on its way"
    assert watches.has_unconfirmed
    watches.on_relist(KIND, [], {"a": 5}, 10)
    assert watches.stale == [KIND]

    watches.on_event(KIND, "a", 6)
    assert watches.stale == [] and not watches.has_unconfirmed, "before the next list"


def test_relists_in_quick_succession_do_not_make_a_watch_stale() -> None:
    """Each watch that was interrupted brings one on, while another has not begun again."""
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    for now in range(1, 10):
        watches.on_relist(KIND, [], {"a": 5}, now)
        assert watches.stale == [] and watches.has_unconfirmed
    watches.on_relist(KIND, [], {"a": 5}, 10)
    assert watches.stale == [KIND], "since the first of them"


def test_a_watch_without_events_is_stale_even_if_the_object_changes_before_every_relist() -> None:
    watches = WatchHealth(PATIENCE)
    for now in range(11):
        watches.on_relist(KIND, ["a"], {"a": 5 + now}, now)
    assert watches.stale == [KIND]


def test_a_change_reported_before_the_relist_needs_no_confirmation() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_event(KIND, "a", 5)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    assert not watches.has_unconfirmed
    watches.on_relist(KIND, [], {"a": 5}, 10)
    assert watches.stale == []


def test_a_new_change_after_a_confirmed_one_gets_its_own_deadline() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    watches.on_event(KIND, "a", 5)
    watches.on_relist(KIND, ["a"], {"a": 9}, 10)
    assert watches.stale == [], "its event may be on its way"
    watches.on_relist(KIND, [], {"a": 9}, 20)
    assert watches.stale == [KIND]


def test_deleted_objects_and_changes_found_before_a_reset_do_not_make_a_watch_stale() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_relist(KIND, ["a"], {"a": 5}, 0)
    watches.on_relist(KIND, [], {}, 10)
    assert watches.stale == []

    watches.on_relist(KIND, ["b"], {"b": 7}, 20)
    watches.reset()
    watches.on_relist(KIND, ["b"], {"b": 7}, 30)
    assert watches.stale == []


def test_deletion_events_confirm_a_stale_watch() -> None:
    watches = WatchHealth(PATIENCE)
    watches.on_event(KIND, "a", 5)
    for now in (0, 10):
        watches.on_relist(KIND, ["b"], {"a": 5, "b": 6}, now)
    assert watches.has_unconfirmed and watches.stale == [KIND]
    for uid in "ab":
        watches.on_delete(KIND, uid)

    assert not watches.has_unconfirmed and watches.stale == []
    assert not watches.has_seen(KIND, "a")


def test_a_stale_watch_does_not_affect_other_kinds() -> None:
    watches = WatchHealth(PATIENCE)
    for now in (0, 10):
        watches.on_relist("Pod", ["a"], {"a": 5}, now)
        watches.on_relist("Service", [], {"s": 1}, now)
    assert watches.stale == ["Pod"]
