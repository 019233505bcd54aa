"""A run of all tests fails for a fault, an exception handler or a failure reason that no test exercised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from e2e.failure_paths import declared, handlers, import_hook, recorder
from e2e.failure_paths.__main__ import report
from e2e.failure_paths.exempt import EXEMPT

ROOT = Path(__file__).parents[2]
SOURCE = """
import contextlib

class Thing:
    def read(self, text):
        try:
            return int(text)
        except (TypeError, ValueError):
            return 0
        except Exception:
            raise

def twice(first, second):
    with contextlib.suppress(KeyError, IndexError):
        first()
    try:
        second()
    except OSError:
        return 1
    try:
        second()
    except OSError:
        return 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(recorder, "_recorded", set())
    return str(tmp_path)


def test_each_handler_has_a_name_that_holds_while_lines_move() -> None:
    expected = [
        "m:Thing.read: except (TypeError, ValueError)",
        "m:Thing.read: except Exception",
        "m:twice: suppress KeyError, IndexError",
        "m:twice: except OSError",
        "m:twice: except OSError (2)",
    ]
    assert handlers.names("m", SOURCE) == expected
    assert handlers.names("m", "# a line more\n" + SOURCE) == expected


def test_a_handler_records_that_it_ran_and_changes_nothing_else(folder: str) -> None:
    module = ModuleType("m")
    exec(compile(handlers.instrumented("m", SOURCE), "m.py", "exec"), module.__dict__)
    thing = module.Thing()

    assert thing.read("7") == 7
    assert not Path(folder, "records").exists()
    assert thing.read("x") == 0
    assert recorder.read(folder) == {"except m:Thing.read: except (TypeError, ValueError)"}
    assert module.twice({}.popitem, dict) is None
    assert "except m:twice: suppress KeyError, IndexError" in recorder.read(folder)
    assert module.twice(dict, lambda: os.stat("/nowhere")) == 1
    assert "except m:twice: except OSError" in recorder.read(folder)
    assert len(recorder.read(folder)) == 3


def test_a_process_that_a_test_starts_records_what_it_runs(folder: str) -> None:
    environment = {"PATH": os.environ["PATH"], **import_hook.environment(str(ROOT / "operator"))}
    command = [sys.executable, "-m", "quire_operator", "render", "/nowhere"]
    for _ in range(2):  # compiled, then from the bytecode that was kept
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert "/nowhere" in done.stderr and "Traceback" not in done.stderr
        caught = "except (QuireOperatorError, yaml.YAMLError, OSError, UnicodeError)"
        assert recorder.read(folder) == {f"except quire_operator.__main__:main: {caught}"}
        Path(folder, "records").unlink()
    assert list(Path(folder, "bytecode").rglob("quire_operator/__pycache__/__main__*.pyc"))


def test_without_the_variable_no_process_records_and_no_import_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(recorder.VARIABLE, raising=False)
    assert import_hook.environment("anything") == {}
    recorder.record("fault", "none")  # to nowhere


def test_what_no_test_exercised_fails_and_so_does_an_exemption_that_is_not_true() -> None:
    wanted = {"fault a", "fault b", "except c"}

    assert report(wanted, {"fault a", "except c"}, {"fault b": "why"})[1]
    text, is_complete = report(wanted, {"fault a"}, {"fault b": "why"})
    assert not is_complete and "no test exercised: except c" in text
    text, is_complete = report(wanted, wanted, {"fault b": "why", "fault gone": "why"})
    assert not is_complete
    assert "exempt, but exercised or not declared: fault b" in text
    assert "exempt, but exercised or not declared: fault gone" in text


def test_every_exemption_is_declared_and_gives_a_reason() -> None:
    assert set(EXEMPT) <= declared.records()
    assert all(len(reason.split()) > 5 for reason in EXEMPT.values())


def test_make_test_ends_with_the_check_of_the_whole_run() -> None:
    asked = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "test"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "KUBECONFIG"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.splitlines()[-1].endswith("-m e2e.failure_paths")
