"""What kubectl says reaches the user as one sentence, and files that only the plugin has open are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KLOG = """echo 'E1123 22:16:04.452355    9783 memcache.go:265] "Unhandled Error" err="dial tcp: refused"' >&2
"""
REFUSED = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
ENDINGS = {
    "an API server that is not there": (KLOG * 5 + f"echo '{REFUSED}' >&2", REFUSED),
    "a file that is not there": (
        """echo 'error: the path "/nonexist" does not exist' >&2""",
        'the path "/nonexist" does not exist',
    ),
    "several fields": (
        """printf 'The LLMDeployment "m" is invalid: \\n* spec.a: Required\\n* spec.b: Required\\n' >&2""",
        'The LLMDeployment "m" is invalid: * spec.a: Required * spec.b: Required',
    ),
    "nothing": ("", "kubectl ended with 1"),
}


def quire(tmp_path: Path, script: str, *arguments: str, **given: object) -> subprocess.CompletedProcess[str]:
    """The plugin over a kubectl that is this shell script."""
    fake = tmp_path / "kubectl"
    fake.write_text(f"#!/bin/sh\n{script}\nexit 1\n")
    fake.chmod(0o755)
    return subprocess.run(
        [sys.executable, "-m", "quire_kubectl", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        pass_fds=given.get("pass_fds", ()),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("arguments", [("status",), ("status", "-w"), ("render", "-f", "/nonexist")])
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_error_of_kubectl_is_one_sentence(tmp_path: Path, ending: str, arguments: tuple[str, ...]) -> None:
    script, sentence = ENDINGS[ending]

    ended = quire(tmp_path, script, *arguments)

    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"error: {sentence}\n")


@pytest.mark.parametrize("command", ["plan", "render"])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_a_manifest_in_an_open_file_of_the_shell_is_read(tmp_path: Path, command: str, kind: str) -> None:
    """As `-f <(helm template ...)` passes it."""
    if kind == "pipe":
        reader, writer = os.pipe()
        os.write(writer, b"kind: LLMDeployment\n")
        os.close(writer)
    else:
        (tmp_path / "m.yaml").write_text("kind: LLMDeployment\n")
        reader = os.open(tmp_path / "m.yaml", os.O_RDONLY)

    ended = quire(
        tmp_path, 'echo "got $(cat) from $*" >&2', command, "-f", f"/dev/fd/{reader}", pass_fds=(reader,)
    )

    os.close(reader)
    assert ended.stderr.startswith("error: got kind: LLMDeployment from create ")
    assert "-f - " in ended.stderr
