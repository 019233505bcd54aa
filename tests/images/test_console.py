"""A long program shows its progress, and a failing one its output."""

import sys

import pytest

from e2e import progress
from e2e.images import console
from e2e.images.errors import ImageError


def test_milestones_are_shown_and_the_rest_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    console.run("it", [sys.executable, "-c", "print('chatter'); print('STEP 1')"], milestones="^STEP")
    shown = capsys.readouterr().out
    assert "STEP 1" in shown and "chatter" not in shown


def test_a_silent_program_is_shown_to_be_alive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.SECONDS_VARIABLE, "0.05")
    console.run("it", [sys.executable, "-c", "import time; time.sleep(0.5)"])
    assert capsys.readouterr().out.count("it") >= 2


def test_a_failure_says_what_the_program_said() -> None:
    with pytest.raises(ImageError, match="no space left"):
        console.run("it", [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"])
