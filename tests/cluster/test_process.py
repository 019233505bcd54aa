"""A process is stopped only if it is the one that was started."""

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster import process


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[process.Record]:
    process.start(tmp_path / "records", "sleeper", ["sleep", "60"], tmp_path / "sleeper.log")
    (record,) = process.recorded(tmp_path / "records")
    yield record
    process.stop([record], grace_seconds=0)
    os.waitpid(record.pid, 0)


def test_the_record_names_the_program_itself(sleeper: process.Record) -> None:
    _wait_for(lambda: Path(f"/proc/{sleeper.pid}/cmdline").read_bytes() == b"sleep\x0060\x00")
    assert process.is_alive(sleeper)


def test_a_stopped_process_is_not_alive_even_before_its_parent_waits_for_it(
    sleeper: process.Record,
) -> None:
    process.stop([sleeper], grace_seconds=5)
    assert not process.is_alive(sleeper)


@pytest.mark.parametrize(
    "other",
    [{"start_time": 1}, {"boot_id": "an-earlier-boot"}, {"pid": os.getppid()}],
    ids=["start time", "boot", "pid"],
)
def test_another_process_under_a_recorded_pid_is_left_alone(
    sleeper: process.Record, other: dict[str, int | str]
) -> None:
    stale = dataclasses.replace(sleeper, **other)  # type: ignore[arg-type]  # the dict's values fit by construction
    process.stop([stale], grace_seconds=0)
    assert not process.is_alive(stale)
    assert process.is_alive(sleeper)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    process.start(tmp_path / "records", "stubborn", stubborn, tmp_path / "log")
    _wait_for(lambda: (tmp_path / "log").read_text() == "ready\n")
    (record,) = process.recorded(tmp_path / "records")
    process.stop([record], grace_seconds=0.1)
    assert not process.is_alive(record)
    os.waitpid(record.pid, 0)


def test_a_name_with_spaces_and_brackets_does_not_confuse_the_start_time() -> None:
    fields = " ".join(str(number) for number in range(5, 53))
    assert process.parse_stat(f"42 (a) b (c)) S 1 {fields}") == (42, 22, "S")


def test_kill_all_looks_again_until_nothing_is_left() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    left = list(children)

    def find() -> set[int]:
        # One at a time, as a dying process may still have forked.
        for child in left:
            if child.poll() is None:
                return {child.pid}
        return set()

    process.kill_all(find)
    assert [child.wait() for child in children] == [-9, -9, -9]
