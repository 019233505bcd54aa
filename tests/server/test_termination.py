"""Reasons, exit codes and the termination log."""

import json
import threading

import pytest

from quire_server import termination
from quire_server.errors import ConfigError, DeviceError, ModelCorruptError, ModelNotFoundError
from quire_server.termination import Failure, Reason


def test_every_reason_has_an_exit_code_of_its_own():
    assert set(termination.EXIT_CODES) == set(Reason)
    assert len(set(termination.EXIT_CODES.values())) == len(Reason)


@pytest.mark.parametrize("text", ["short", "x" * 9000, "ü" * 9000, "\x00\n" * 3000])
def test_the_termination_log_is_small_json_whatever_the_message(text, tmp_path):
    log = tmp_path / "log"
    log.touch()
    termination.write_termination_log(log, Failure(Reason.MODEL_CORRUPT, text))
    assert log.stat().st_size <= 2048
    body = json.loads(log.read_text())
    assert (body["reason"], body["exitCode"]) == ("ModelCorrupt", 65)
    assert text.startswith(body["message"])
    assert len(body["message"]) > min(len(text), 100) - 1


def test_no_log_is_made_where_the_kubelet_made_none(tmp_path):
    termination.write_termination_log(tmp_path / "log", Failure(Reason.CONFIG_ERROR, "m"))
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_ends_nothing_else(tmp_path, caplog):
    termination.write_termination_log(tmp_path, Failure(Reason.CONFIG_ERROR, "m"))
    assert "termination log" in caplog.text


def test_a_child_s_failure_reaches_the_supervisor(tmp_path):
    failure = Failure(Reason.MODEL_NOT_FOUND, "there is no model")
    assert termination.find_failure(tmp_path) is None
    termination.leave_failure(tmp_path, failure)
    assert termination.find_failure(tmp_path) == failure


def test_the_first_failure_is_the_cause_of_the_others(tmp_path):
    first = Failure(Reason.MODEL_CORRUPT, "the file of rank 1 is damaged")
    termination.leave_failure(tmp_path, first)
    termination.leave_failure(tmp_path, Failure(Reason.ENGINE_CRASHED, "rank 1 ended"))
    assert termination.find_failure(tmp_path) == first


def test_a_failure_that_is_being_written_does_not_hide_a_whole_one(tmp_path):
    """Of two threads that find a lost rank, one may end the process before the other has written a byte."""
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Failure):
        def to_json(self):
            begun.set()
            goes_on.wait(10)
            return super().to_json()

    whole = Failure(Reason.ENGINE_CRASHED, "rank 1 ended")
    slow = threading.Thread(
        target=termination.leave_failure, args=(tmp_path, Slow(Reason.ENGINE_CRASHED, "it timed out"))
    )
    slow.start()
    try:
        begun.wait(10)
        termination.leave_failure(tmp_path, whole)
        assert termination.find_failure(tmp_path) == whole
    finally:
        goes_on.set()
        slow.join()
    assert termination.find_failure(tmp_path) == whole


def test_a_failure_that_cannot_be_left_ends_nothing_else(tmp_path, caplog):
    termination.leave_failure(tmp_path / "gone", Failure(Reason.MODEL_NOT_FOUND, "m"))
    assert "cannot leave the failure" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("x"), Reason.CONFIG_ERROR),
        (ModelNotFoundError("x"), Reason.MODEL_NOT_FOUND),
        (DeviceError("x"), Reason.ENGINE_CRASHED),
        (ModelCorruptError("x"), Reason.MODEL_CORRUPT),
        (ZeroDivisionError("x"), Reason.ENGINE_CRASHED),
    ],
)
def test_an_error_has_its_reason(error, reason):
    assert termination.failure_of(error).reason is reason
