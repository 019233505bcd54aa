"""Programs run side by side: all are heard, and one failure ends all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e import progress
from e2e.up import together
from e2e.up.errors import UpError


def test_every_line_is_shown_with_the_name_of_who_said_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say = [sys.executable, "-c", "print('done')"]
    together.run({"images": say, "model": say}, tmp_path)
    shown = capsys.readouterr().out
    assert "[images" in shown and "[model" in shown and shown.count("done") == 2


def test_lines_of_progress_become_one_status_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = "import time\nfor i in range(4): print('  step', i, flush=True); time.sleep(0.3)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(progress.SECONDS_VARIABLE, "0.1")
        together.run(
            {"kube": [sys.executable, "-c", steps], "images": [sys.executable, "-c", steps]}, tmp_path
        )
    lines = capsys.readouterr().out.splitlines()
    assert any("kube: step" in line and "images: step" in line for line in lines)
    assert not any("[kube" in line for line in lines)


def test_the_first_failure_ends_the_others_and_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UpError, match="images failed"):
        together.run(
            {
                "model": [sys.executable, "-c", "import time; time.sleep(50)"],
                "images": [sys.executable, "-c", "raise SystemExit(1)"],
            },
            tmp_path,
        )
    assert time.monotonic() - began < 30


def test_ctrl_c_is_answered_with_one_line_and_code_130_and_ends_the_programs(tmp_path: Path) -> None:
    """The terminal interrupts every process of `make up`, and each Python among them has a traceback."""
    script = f"""
import signal, sys
from pathlib import Path
from e2e.up import __main__ as command, flow, together
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
sleeps = [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(50)"]
flow.run = lambda root, environ: together.run({{"images": sleeps}}, Path({str(tmp_path)!r}))
sys.exit(command.main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != "KUBECONFIG"},
    ) as process:
        assert process.stdout is not None
        while "begun" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Traceback" not in out
    assert err.split("\n") == [
        "",
        "interrupted: `make up` goes on from here, `make down` takes it away",
        "",
    ]
