"""The patch contains what changed and no more; an Event is recorded once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.status import transitions
from tests.operator.fake_api import merged

Body = dict[str, Any]


def with_conditions(**reported: tuple[str, str]) -> Body:
    return {
        "conditions": [
            {"type": kind, "status": value, "reason": reason, "message": reason}
            for kind, (value, reason) in reported.items()
        ]
    }


def test_an_event_is_reported_once_for_each_new_reason() -> None:
    fine = with_conditions(Degraded=("False", "AsExpected"), Stalled=("False", "Progressing"))
    bad = with_conditions(Degraded=("True", "OOMKilled"), Stalled=("False", "Progressing"))
    worse = with_conditions(Degraded=("True", "ModelCorrupt"), Stalled=("True", "ModelCorrupt"))

    assert [e.reason for e in transitions.events(fine, bad)] == ["OOMKilled"]
    assert transitions.events(bad, bad) == ()
    assert [e.reason for e in transitions.events(bad, worse)] == ["ModelCorrupt"]
    assert transitions.events(worse, fine) == ()
    assert [e.reason for e in transitions.events(fine, bad)] == ["OOMKilled"]


def test_becoming_ready_is_reported_and_staying_ready_is_not() -> None:
    ready = with_conditions(Ready=("True", "AllReplicasReady"))

    assert [(e.kind, e.reason) for e in transitions.events({}, ready)] == [("Normal", "Ready")]
    assert transitions.events(ready, ready) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return value


@given(st.dictionaries(st.sampled_from("abc"), JSON), st.dictionaries(st.sampled_from("abc"), JSON))
def test_the_merge_patch_turns_the_old_status_into_the_new(old: Body, new: Body) -> None:
    old, new = without_nulls(old), without_nulls(new)

    assert merged(old, transitions.merge_patch(old, new)) == new


@pytest.mark.parametrize(
    "turn",
    [
        {"phase": "Serving"},
        {"observedGeneration": 2},
        {"readyReplicas": 1},
        {"conditions": [{"type": "Degraded", "status": "True", "reason": "ModelCorrupt", "message": "m"}]},
    ],
)
def test_a_change_that_clients_wait_for_is_not_transient(turn: Body) -> None:
    old: Body = {"phase": "Pending", "observedGeneration": 1, "readyReplicas": 0}

    assert transitions.is_transient(old, {**old, "replicas": 1})
    assert not transitions.is_transient(old, old | turn)


def test_only_a_change_of_loaded_bytes_counts_as_progress_only() -> None:
    assert transitions.is_progress_only({"model": {"bytesLoaded": 5}})
    assert not transitions.is_progress_only({"model": {"bytesLoaded": 5}, "phase": "Loading"})
    assert not transitions.is_progress_only({"model": {"bytesTotal": 5}})
