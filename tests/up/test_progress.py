"""One status line on a terminal, a line now and then in a log."""

import io

import pytest

from e2e import progress
from e2e.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.SECONDS_VARIABLE, "0")


def test_a_terminal_shows_the_last_state_only_and_the_lines_that_stay() -> None:
    out = Terminal()
    status = Progress(out)
    status.update("kube: 1 of 3000 packages")
    status.update("kube: 2 of 3000 packages")
    status.keep("built kube in 9 s")
    status.end()

    assert out.getvalue().count("\n") == 1
    visible = [part.rpartition("\x1b[K")[2] for part in out.getvalue().split("\r")]
    assert visible[1:] == ["  kube: 1 of 3000 packages", "  kube: 2 of 3000 packages", "built kube in 9 s\n"]


def test_a_log_gets_whole_lines_marked_as_progress() -> None:
    out = io.StringIO()
    status = Progress(out)
    status.update("kube: 1 of 3000 packages")
    status.keep("built kube in 9 s")
    status.end()

    assert out.getvalue() == "  kube: 1 of 3000 packages\nbuilt kube in 9 s\n"


def test_updates_in_between_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.SECONDS_VARIABLE, "60")
    out = io.StringIO()
    status = Progress(out)
    status.update("kube: 1 of 3000 packages")

    assert out.getvalue() == ""


def test_a_long_state_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    Progress(out).update("x" * 200)

    assert len(out.getvalue().rpartition("\x1b[K")[2]) == 39
