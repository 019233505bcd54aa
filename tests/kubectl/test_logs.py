"""`kubectl quire logs` over a kubectl that tells of pods and their logs as the real one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE = """#!{python}
import json, pathlib, sys
told = json.loads(pathlib.Path({told!r}).read_text())
arguments = sys.argv[1:]
if arguments[0] == "logs":
    key = " ".join([arguments[1], arguments[3], *(["previous"] if "--previous" in arguments else [])])
    if key not in told["logs"]:
        sys.exit("Error from server: no log of " + key)
    sys.stdout.write(told["logs"][key])
elif "--watch" in arguments:
    for pods in told["later"]:
        print(json.dumps({{"type": "MODIFIED", "object": pods}}), flush=True)
    pathlib.Path({told!r}).write_text(json.dumps({{**told, "later": []}}))
    if not told["later"]:
        sys.exit("the API server is gone")
elif arguments[1].startswith("llmdeployments"):
    print("{{}}")
else:
    print(json.dumps({{"kind": "List", "items": told["pods"]}}))
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
    def run(told: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        file, fake = tmp_path / "told", tmp_path / "kubectl"
        file.write_text(json.dumps({"later": [], "pods": [], "logs": {}, **told}))
        fake.write_text(FAKE.format(python=sys.executable, told=str(file)))
        fake.chmod(0o755)
        command = [sys.executable, "-m", "quire_kubectl", "logs", "m", *arguments]
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)

    return run


def test_every_line_says_whose_it_is_and_what_ended_badly_comes_first(logs: Any) -> None:
    message = json.dumps({"reason": "ModelNotFound", "message": "no such file\u001b[2J: /models/x"})
    last = {"exitCode": 66, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z", "message": message}
    fetch = container("fetch", terminated={"exitCode": 0})
    told = {
        "pods": [pod("m-a", container(), init=(fetch,)), pod("m-b", container(restarts=1, last=last))],
        "logs": {"m-a fetch": "fetched\n", "m-a server": "one\n\x1b[31mtwo\n", "m-b server": "three\n"},
    }

    shown = logs(told)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        "[m-b server] ended with 66 (ModelNotFound) at 2026-01-01T00:00:00Z: no such file [2J: /models/x",
        "[m-a fetch] fetched",
        "[m-a] one",
        "[m-a]  [31mtwo",
        "[m-b] three",
    ]


def test_a_container_that_has_not_started_hides_nobodys_log(logs: Any) -> None:
    waits = container(waiting={"reason": "PodInitializing"})
    told = {"pods": [pod("m-a", waits), pod("m-b", container())], "logs": {"m-b server": "serving\n"}}

    assert logs(told).stdout == "[m-b] serving\n"
    nothing = logs({"pods": [pod("m-a", waits)]})
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "no container has started; kubectl quire status m says why" in nothing.stderr


def test_previous_shows_only_what_ended_before(logs: Any) -> None:
    told = {
        "pods": [pod("m-a", container()), pod("m-b", container(restarts=2))],
        "logs": {"m-b server previous": "died\n"},
    }

    assert logs(told, "-p").stdout == "[m-b] died\n"
    assert logs({"pods": [pod("m-a", container())]}, "-p").returncode == 3


def test_one_log_that_cannot_be_read_hides_no_other_and_is_an_error(logs: Any) -> None:
    told = {"pods": [pod("m-a", container()), pod("m-b", container())], "logs": {"m-b server": "there\n"}}

    shown = logs(told)

    assert shown.returncode == 1 and shown.stdout == "[m-b] there\n"
    assert "no log of m-a server" in shown.stderr and "the log of m-a could not be read" in shown.stderr


def test_following_finds_pods_and_containers_that_start_later_once_each(logs: Any) -> None:
    again = pod("m-a", container(restarts=1))
    told = {
        "later": [pod("m-a", container()), pod("m-a", container()), again, pod("m-b", container())],
        "logs": {"m-a server": "a\n", "m-b server": "b\n"},
    }

    shown = logs(told, "-f")

    assert sorted(shown.stdout.splitlines()) == ["[m-a] a", "[m-a] a", "[m-b] b"]
    assert shown.returncode == 1 and "the API server is gone" in shown.stderr
