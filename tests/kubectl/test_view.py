"""An LLMDeployment on a terminal: wide, narrow, without colours, through a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire_kubectl import view
from quire_kubectl.terminal import Canvas, Look

GB = 10**9
FAKE = """#!{python}
import json, pathlib, sys
calls = pathlib.Path({calls!r})
number = len(calls.read_text().splitlines()) if calls.exists() else 0
calls.open("a").write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads({answers!r})
if number >= len(answers):
    sys.exit("the API server is gone")
for event in answers[number]:
    print(json.dumps(event), flush=True)
"""


def loading(name: str = "qwen", *, loaded: int = 3 * GB, **status: Any) -> dict[str, Any]:
    message = "0 of 1 replicas ready. Pods are loading the model; status.model says how far they are."
    return {
        "metadata": {"namespace": "team-a", "name": name, "uid": name},
        "status": {
            "phase": "Loading",
            "replicas": 1,
            "readyReplicas": 0,
            "loadingReplicas": 1,
            "url": f"http://{name}.team-a.svc/v1",
            "model": {"bytesTotal": 8 * GB, "bytesLoaded": loaded, "etaSeconds": 411},
            "conditions": [{"type": "Ready", "status": "False", "reason": "Loading", "message": message}],
            **status,
        },
    }


def plain(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)


@pytest.mark.parametrize("width", [32, 44, 80, 200])
@pytest.mark.parametrize("has_colours", [True, False])
def test_every_line_fits_the_width_and_progress_bytes_and_eta_are_shown(
    width: int, has_colours: bool
) -> None:
    look = Look(width=width, has_colours=has_colours)
    table, details = view.table([loading(), loading("b" * 40)], look), view.details(loading(), look)

    assert max(len(line) for line in plain(table + "\n" + details).splitlines()) <= width
    assert re.search(r"\[#+\.+\]  38%", details)
    reported = " ".join(plain(details).split())
    assert (
        "3.00 of 8.00 GB, 6 min 51 s left" in reported and "status.model says how far they are." in reported
    )
    assert ("\x1b[33mLoading\x1b[0m" in details) == has_colours
    assert width < 80 or "38%" in table


def test_a_download_without_loading_replicas_shows_its_progress() -> None:
    table = view.table([loading(phase="Downloading", loadingReplicas=0)], Look(width=200, has_colours=False))
    assert "38%" in table and "Downloading" in table


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_colours_are_off_with_no_color_a_dumb_terminal_or_a_pipe(environ: dict[str, str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Look.of(Terminal(), {"TERM": "xterm"}).has_colours
    assert not Look.of(Terminal(), environ).has_colours
    assert Look.of(io.StringIO(), {"TERM": "xterm"}) == Look()


def test_the_effective_context_and_arithmetic_are_shown_with_what_was_wanted() -> None:
    engine = {"maxModelLen": 176, "wantedModelLen": 8192, "dtype": "bfloat16", "quantization": "int8"}
    message = "The KV cache holds less (176 of 8,192 tokens). Raise it."
    reduced = {"type": "ContextReduced", "status": "True", "reason": "ContextTooSmall", "message": message}
    shown = view.details(
        loading(engine={**engine, "inexactDefaults": ["quantization"]}, conditions=[reduced])
    )
    whole = view.details(loading(engine={**engine, "maxModelLen": 8192, "nativeKernels": "avx2"}))

    assert re.search(r"context +176 of 8,192 tokens\n", shown)
    assert "bfloat16, int8 (less exact by default: engine.quantization)" in shown
    assert f"ContextTooSmall: {message}" in shown
    assert re.search(r"context +8,192 tokens\n", whole) and "less exact" not in whole
    assert "bfloat16, int8, CPU kernels: avx2\n" in whole


def test_control_characters_from_a_model_server_never_reach_the_terminal() -> None:
    hostile = {"reason": "EngineCrashed", "message": "gone\x1b]0;owned\x07\r\u202e", "time": "\x1b[2J"}
    shown = view.details(loading(lastFailure=hostile), Look(width=80, has_colours=True))
    assert plain(shown).isprintable() is False and set(re.findall(r"[^\n -~]", plain(shown))) == set()


def test_a_condition_that_is_no_part_of_the_last_failure_has_a_row_with_its_own_name() -> None:
    crash = "A process of the server ended unexpectedly."
    conditions = [
        {"type": "Ready", "status": "False", "reason": "Loading", "message": "0 of 1 replicas ready."},
        {"type": "Degraded", "status": "True", "reason": "EngineCrashed", "message": crash},
        {"type": "Scheduled", "status": "False", "reason": "WaitingForNode", "message": "No node fits."},
    ]
    failure = {"reason": "EngineCrashed", "message": crash, "time": "2026-11-23T20:00:00Z"}

    shown = view.details(loading(lastFailure=failure, conditions=conditions), Look()).splitlines()

    assert shown[-3:] == [
        "  last failure  EngineCrashed at 2026-11-23T20:00:00Z",
        f"                {crash}",
        "  Scheduled     WaitingForNode: No node fits.",
    ]


def test_a_replica_without_a_node_is_in_the_table_the_details_and_the_exit_code() -> None:
    conditions = [
        {"type": "Ready", "status": "True", "reason": "MinimumReplicasReady", "message": "1 of 2 ready."},
        {"type": "Scheduled", "status": "False", "reason": "WaitingForGPU", "message": "Pod m-1 has none."},
    ]
    partly = loading(phase="Degraded", conditions=conditions)
    whole = loading(phase="Serving", conditions=conditions[:1])

    assert "WaitingForGPU" in view.table([partly]) and "Pod m-1 has none." in view.details(partly)
    assert (view.code(partly), view.code(whole)) == (3, 0)


def test_the_terminal_is_redrawn_in_place_within_its_height(monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.terminal_size((40, 10))
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: size)
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as out:
        canvas = Canvas(out)
        canvas.show("x" * 90 + "\nsecond")
        canvas.show("\n".join(f"line {i}" for i in range(50)))
        canvas.show("end")
        drawn = b""
        while b"end" not in drawn:
            drawn += os.read(reader, 1 << 16)
    os.close(reader)

    first, second, third = drawn.decode().split("\r\x1b[J")[1:]
    assert first.endswith("\x1b[4A"), "90 characters are three lines of 40"
    assert "line 7" in second and "line 8" not in second and "42 lines more" in second
    assert second.endswith("\x1b[9A") and third.split() == ["end"]


def watched(tmp_path: Path, answers: list[Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`status -w` over a kubectl that reports one list of events each time, and then fails."""
    fake = tmp_path / "kubectl"
    calls = str(tmp_path / "calls")
    fake.write_text(FAKE.format(python=sys.executable, calls=calls, answers=json.dumps(answers)))
    fake.chmod(0o755)
    command = [sys.executable, "-m", "quire_kubectl", "status", *arguments, "-w"]
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)


def test_an_ended_watch_is_resumed_without_repeated_output(tmp_path: Path) -> None:
    one, two = loading(), loading(loaded=4 * GB)
    answers = [
        [{"type": "ADDED", "object": one}],
        [{"type": "ADDED", "object": one}, {"type": "MODIFIED", "object": two}],
    ]

    ended = watched(tmp_path, answers, "qwen", "-o", "json")

    assert [json.loads(line) for line in ended.stdout.splitlines()] == [one, two]
    assert ended.returncode == 1 and "the API server is gone" in ended.stderr


def test_a_deleted_llmdeployment_is_removed_from_the_table(tmp_path: Path) -> None:
    gone = loading("gone")
    answers = [
        [
            {"type": "ADDED", "object": gone},
            {"type": "ADDED", "object": loading()},
            {"type": "DELETED", "object": gone},
        ]
    ]

    shown = watched(tmp_path, answers).stdout

    assert shown.count("gone") == 2 and "gone" not in shown.split("NAMESPACE")[-1]
    assert "\x1b" not in shown


def test_ready_replicas_are_shown_beside_those_that_are_wanted() -> None:
    """A quota refuses the second pod, so that only one exists."""
    document = loading(phase="Degraded", replicas=1, desiredReplicas=2, readyReplicas=1, loadingReplicas=0)

    assert "1/2" in view.table([document])
    assert "1 of 2 ready" in view.details(document)


def test_prefill_pods_are_counted_beside_the_others_and_degraded_transfers_are_explained() -> None:
    degraded = {
        "type": "TransferDegraded",
        "status": "True",
        "reason": "TransferDegraded",
        "message": "Decode pods compute long prompts themselves.",
    }
    roles = [
        {"name": "decode", "desiredReplicas": 2, "readyReplicas": 2},
        {"name": "prefill", "desiredReplicas": 3, "readyReplicas": 1},
    ]
    shown = view.details(loading(phase="Serving", roles=roles, conditions=[degraded]))

    assert re.search(r"prefill +1 of 3 ready", shown)
    assert "TransferDegraded: Decode pods compute" in shown
    assert "prefill" not in view.details(loading(phase="Serving"))


@pytest.mark.parametrize(
    ("sharing", "shown"),
    [
        ({"pool": "card", "state": "Awake", "awake": "qwen"}, "card: awake"),
        (
            {"pool": "card", "state": "Asleep", "awake": "phi", "lastSwapSeconds": 131},
            "card: asleep, phi has the accelerator; its last swap took 2 min 11 s",
        ),
        (
            {"pool": "card", "state": "Waiting", "awake": "phi", "turnTime": "2026-01-01T12:00:07Z"},
            "card: waiting, phi has the accelerator, its turn at 2026-01-01T12:00:07Z at the latest",
        ),
    ],
)
def test_whose_turn_it_is_on_a_shared_accelerator_is_shown(sharing: dict[str, Any], shown: str) -> None:
    assert f"  pool          {shown}" in view.details(loading(sharing=sharing))
    assert "pool" not in view.details(loading())


def test_adapters_that_are_not_ready_are_named_and_a_broken_one_is_explained() -> None:
    failed = {
        "type": "AdaptersReady",
        "status": "False",
        "reason": "AdapterFailed",
        "message": "An adapter cannot be downloaded.",
    }
    adapters = [
        {"name": "a", "state": "Ready"},
        {"name": "b", "state": "Fetching", "progress": "45%"},
        {"name": "c", "state": "Failed"},
    ]
    shown = view.details(loading(phase="Serving", adapters=adapters, conditions=[failed]))

    assert re.search(r"adapters +1 of 3 ready: b Fetching 45%, c Failed", shown)
    assert "AdapterFailed: An adapter cannot" in shown
    assert "adapters" not in view.details(loading(phase="Serving"))
