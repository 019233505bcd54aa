"""`kubectl quire logs` with a fake kubectl that reports pods and logs as the real one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE = """#!{python}
import json, pathlib, sys, time
reported = json.loads(pathlib.Path({reported!r}).read_text())
arguments = sys.argv[1:]
if arguments[0] == "logs":
    key = " ".join([arguments[1], arguments[3], *(["previous"] if "--previous" in arguments else [])])
    asked = pathlib.Path({reported!r} + "." + key.replace(" ", "."))
    turn = len(asked.read_text().splitlines()) if asked.exists() else 0
    with asked.open("a") as file:
        file.write(" ".join(arguments) + "\\n")
    if key not in reported["logs"]:
        sys.exit("Error from server: no log of " + key)
    streams = reported["logs"][key]
    if isinstance(streams, str):
        sys.stdout.write(streams)
    else:
        text, code = streams[min(turn, len(streams) - 1)]
        sys.stdout.write(text)
        sys.exit(code)
elif "--watch" in arguments:
    round, *later = reported["later"] or [None]
    rest = pathlib.Path({reported!r} + ".rest")
    rest.write_text(json.dumps({{**reported, "later": later}}))
    rest.replace({reported!r})  # whole: others read it meanwhile
    if round is None:
        sys.exit("the API server is gone")
    for after, pod in round:
        key, _, count = after.partition(":")
        asked = pathlib.Path({reported!r} + "." + key)
        while key and not (asked.exists() and len(asked.read_text().splitlines()) >= int(count)):
            time.sleep(0.01)
        print(json.dumps({{"type": "MODIFIED", "object": pod}}), flush=True)
elif arguments[:2] == ["get", "pod"]:
    sys.stdout.write("pod/there" if arguments[2] in reported["there"] else "")
elif arguments[1].startswith("llmdeployments"):
    print("{{}}")
else:
    print(json.dumps({{"kind": "List", "items": reported["pods"]}}))
"""

# A person waits longer for an API server that is away.
START = """
import sys
from quire_kubectl import __main__, kubectl, logs
kubectl.PATIENCE_SECONDS, kubectl._WATCH_AGAIN_SECONDS, logs._AGAIN_SECONDS = {patience}, 0.01, 0.01
sys.exit(__main__.main())
"""


def container(name: str = "server", *, restarts: int = 0, last: Any = None, **state: Any) -> dict[str, Any]:
    ended = {} if last is None else {"lastState": {"terminated": last}}
    return {"name": name, "restartCount": restarts, "state": state or {"running": {}}, **ended}


def pod(name: str, *containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": name},
        "status": {"containerStatuses": list(containers), "initContainerStatuses": list(init)},
    }


@pytest.fixture
def logs(tmp_path: Path) -> Any:
    def run(reported: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        file, fake = tmp_path / "reported", tmp_path / "kubectl"
        file.write_text(json.dumps({"later": [], "pods": [], "logs": {}, "there": [], **reported}))
        fake.write_text(FAKE.format(python=sys.executable, reported=str(file)))
        fake.chmod(0o755)
        command = [
            sys.executable,
            "-c",
            START.format(patience=reported.get("patience", 0)),
            "logs",
            "m",
            *arguments,
        ]
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)

    return run


def test_lines_are_prefixed_with_pod_and_container_and_failed_terminations_come_first(logs: Any) -> None:
    message = json.dumps({"reason": "ModelNotFound", "message": "no such file\u001b[2J: /models/x"})
    last = {"exitCode": 66, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z", "message": message}
    fetch = container("fetch", terminated={"exitCode": 0})
    reported = {
        "pods": [pod("m-a", container(), init=(fetch,)), pod("m-b", container(restarts=1, last=last))],
        "logs": {"m-a fetch": "fetched\n", "m-a server": "one\n\x1b[31mtwo\n", "m-b server": "three\n"},
    }

    shown = logs(reported)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        "[m-b server] ended with 66 (ModelNotFound) at 2026-01-01T00:00:00Z: no such file [2J: /models/x",
        "[m-a fetch] fetched",
        "[m-a] one",
        "[m-a]  [31mtwo",
        "[m-b] three",
    ]


def test_containers_that_have_not_started_do_not_hide_other_logs(logs: Any) -> None:
    waits = container(waiting={"reason": "PodInitializing"})
    reported = {"pods": [pod("m-a", waits), pod("m-b", container())], "logs": {"m-b server": "serving\n"}}

    assert logs(reported).stdout == "[m-b] serving\n"
    nothing = logs({"pods": [pod("m-a", waits)]})
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "no container has started; kubectl quire status m says why" in nothing.stderr


def test_previous_shows_only_logs_of_terminated_containers(logs: Any) -> None:
    reported = {
        "pods": [pod("m-a", container()), pod("m-b", container(restarts=2))],
        "logs": {"m-b server previous": "died\n"},
    }

    assert logs(reported, "-p").stdout == "[m-b] died\n"
    assert logs({"pods": [pod("m-a", container())]}, "-p").returncode == 3


def test_an_unreadable_log_is_an_error_and_does_not_hide_other_logs(logs: Any) -> None:
    reported = {"pods": [pod("m-a", container()), pod("m-b", container())], "logs": {"m-b server": "there\n"}}

    shown = logs(reported)

    assert shown.returncode == 1 and shown.stdout == "[m-b] there\n"
    assert "no log of m-a server" in shown.stderr and "the log of m-a could not be read" in shown.stderr


def at(second: int, *lines: str) -> str:
    return "".join(f"2026-01-01T00:00:0{second}.5Z {line}\n" for line in lines)


def test_follow_shows_pods_and_containers_that_start_later_once_each(logs: Any) -> None:
    first, again, other = pod("m-a", container()), pod("m-a", container(restarts=1)), pod("m-b", container())
    reported = {
        "later": [
            [
                ["", first],
                ["", first],
                ["m-a.server:1", again],
                ["m-a.server:3", other],
                ["m-b.server:2", other],
            ]
        ],
        "logs": {
            "m-a server": [[at(1, "a"), 0], [at(1, "a") + at(2, "a"), 0]],
            "m-b server": [[at(1, "b"), 0]],
        },
    }

    shown = logs(reported, "-f")

    assert sorted(shown.stdout.splitlines()) == ["[m-a] a", "[m-a] a", "[m-b] b"]
    assert shown.returncode == 1 and "the API server is gone" in shown.stderr


def test_a_broken_log_stream_is_resumed_without_lost_or_repeated_lines(logs: Any, tmp_path: Path) -> None:
    running = pod("m-a", container())
    streams = [
        [at(3, "same", "same", "three") + at(4, "four")[:-3], 1],
        [at(2, "cut by --tail") + at(3, "same", "same", "three", "late") + at(4, "four"), 0],
        [at(3, "late") + at(4, "four", "four"), 1],
    ]
    reported = {
        "later": [[["", running], ["m-a.server:4", running]]],
        "logs": {"m-a server": streams},
        "there": ["m-a"],
    }

    shown = logs(reported, "-f", "--tail", "4")

    lines = ["same", "same", "three", "late", "four", "four"]
    assert shown.stdout.splitlines() == [f"[m-a] {line}" for line in lines]
    first, second, third, *_ = (tmp_path / "reported.m-a.server").read_text().splitlines()
    assert "--tail=4" in first and "--since-time" not in first
    assert "--since-time=2026-01-01T00:00:02Z" in second and "--tail" not in second
    assert "--since-time=2026-01-01T00:00:03Z" in third


def test_a_terminated_container_is_read_to_its_end_and_not_again(logs: Any, tmp_path: Path) -> None:
    ended, other = pod("m-a", container(terminated={"exitCode": 1})), pod("m-b", container())
    reported = {
        "later": [
            [["", pod("m-a", container())], ["m-a.server:1", ended], ["m-a.server:2", other]],
            [["m-b.server:4", other]],
        ],
        "logs": {
            "m-a server": [[at(1, "one") + at(2, "bro")[:-1], 1], [at(2, "broken", "last")[:-1], 0]],
            "m-b server": [["", 0]],
        },
        "there": ["m-a", "m-b"],
    }

    shown = logs(reported, "-f")

    assert shown.stdout.splitlines() == ["[m-a] one", "[m-a] broken", "[m-a] last"]
    assert len((tmp_path / "reported.m-a.server").read_text().splitlines()) <= 3


def test_follow_continues_after_the_api_server_was_unavailable(logs: Any, tmp_path: Path) -> None:
    """Meanwhile the pod m-a is deleted, which no watch reports."""
    first, other = pod("m-a", container()), pod("m-b", container())
    reported = {
        "patience": 3,
        "later": [[["", first]], None, None, [["", other], ["m-b.server:4", other]]],
        "logs": {"m-b server": [[at(1, "b"), 0]]},
        "there": ["m-b"],
    }

    shown = logs(reported, "-f")

    assert shown.stdout == "[m-b] b\n"
    assert shown.returncode == 1, "it is away for good in the end"
    assert len((tmp_path / "reported.m-a.server").read_text().splitlines()) == 1
