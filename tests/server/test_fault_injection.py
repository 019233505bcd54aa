"""Faults are injected at their threshold, and only once with `once`."""

import pytest

from quire_server import fault_injection
from quire_server.errors import ConfigError

ALLOWED = {"QUIRE_ALLOW_FAULTS": "1"}


def switch(text, tmp_path):
    return fault_injection.parse({**ALLOWED, "QUIRE_FAULT": text}, tmp_path)


def test_a_fault_strikes_from_its_count_on(tmp_path):
    switched = switch("stuck_step:after=3", tmp_path)
    assert [switched.due("stuck_step", count) for count in range(5)] == [False, False, False, True, True]
    assert not switched.due("crash_step", 9)


def test_a_once_fault_does_not_strike_again_after_a_restart(tmp_path):
    for text in ("crash_on_load,once", "stuck_step:after=1,once"):
        name = text.split(":")[0].split(",")[0]
        assert switch(text, tmp_path).due(name, 2)
        assert not switch(text, tmp_path).due(name, 2)


def test_the_log_says_once_that_a_fault_took_effect_and_nothing_before(tmp_path, caplog):
    switched = switch("stuck_step:after=1;crash_step:after=9", tmp_path)
    switched.due("stuck_step", 0)
    assert not caplog.records
    for count in (1, 2):
        switched.due("stuck_step", count)
    assert [(record.message, record.fault) for record in caplog.records] == [
        (fault_injection.INJECTED, "stuck_step")
    ]


def test_several_faults_are_separated_by_semicolons(tmp_path):
    switched = switch("queue_depth:after=7; slow_load:after=0.5,once", tmp_path)
    assert switched.get("queue_depth").after == 7
    assert switched.get("slow_load") == fault_injection.Fault("slow_load", 0.5, True)


def test_a_fault_of_a_rank_names_the_rank_and_its_place_in_the_pass(tmp_path):
    fault = switch("rank_delay:after=7,rank=2,late,seconds=0.01", tmp_path).get("rank_delay")
    assert (fault.after, fault.rank, fault.late, fault.seconds) == (7, 2, True, 0.01)
    assert switch("rank_exit", tmp_path).get("rank_exit").rank == 1


@pytest.mark.parametrize(
    "text", ["nope", "stuck_step:after", "stuck_step:after=-1", "stuck_step,twice", "x:after=nan"]
)
def test_a_bad_switch_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="QUIRE_FAULT"):
        switch(text, tmp_path)
