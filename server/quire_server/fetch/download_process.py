"""One adapter's download: ``quire-server fetch`` as a child that dies with this process, and has the
credentials of its adapter alone.

What it prints is read without waiting, so that neither fills the pipe that it writes to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from quire_server import parent_death
from quire_server.errors import ConfigError
from quire_server.fetch.adapter_list import VARIABLES, Entry
from quire_server.fetch.adapter_plan import Download, Fetched
from quire_server.termination import EXIT_CODES, Reason

_MAX_CREDENTIAL_BYTES = 64 << 10
_MAX_KEPT_BYTES = 16 << 10
_ATTEMPTS = 3  # of one file; a download that failed is tried again as a whole
#: What a download takes over of this process's environment: where things are, and the pod's own identity.
_INHERITED = VARIABLES | {
    "HOME", "LANG", "PATH", "TMPDIR", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME", "AWS_STS_REGIONAL_ENDPOINTS", "AWS_WEB_IDENTITY_TOKEN_FILE",
}  # fmt: skip
_OPTIONAL = {"AWS_SESSION_TOKEN"}  # only temporary credentials have one
_PREFIX = "quire-server: "
_REASONS = {code: reason for reason, code in EXIT_CODES.items()}


class DownloadProcess:
    """``to``: the directory that appears when the adapter is whole. Raises ConfigError where a file with a
    credential cannot be read, and OSError.
    """

    def __init__(self, entry: Entry, to: Path, claims: PurePosixPath, environ: Mapping[str, str]) -> None:
        self.key, self.is_killed = entry.key, False
        arguments = (
            *("fetch", entry.source, "--adapter", "--to", str(to), "--root", str(claims)),
            *("--parallel", "2", "--attempts", str(_ATTEMPTS)),
            *(["--anonymous"] if entry.anonymous else []),
        )
        self._process = subprocess.Popen(
            # -P: never import modules from the current directory.
            [sys.executable, "-Pm", parent_death.__name__, "quire_server", *arguments],
            env={**environment(entry, environ), parent_death.PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process alone
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.output, self._errors = self._process.stdout, self._process.stderr
        for pipe in (self.output, self._errors):
            os.set_blocking(pipe.fileno(), False)
        self._printed = self._complaints = b""
        self._document: Mapping[str, object] = {}

    def read(self) -> bool:
        """Take in what was printed. Returns whether the process has ended."""
        has_ended, self._printed = _drained(self.output, self._printed)
        _, self._complaints = _drained(self._errors, self._complaints)
        *lines, self._printed = self._printed.split(b"\n")
        for line in [line for line in lines if line.startswith(b"{")][-1:]:
            self._document = json.loads(line)
        if has_ended:
            self._process.wait()  # its end has closed the pipe
            _, self._complaints = _drained(self._errors, self._complaints)
        return has_ended

    def progress(self) -> Download:
        """How far it is."""
        loaded, total = self._document.get("loadedBytes", 0), self._document.get("totalBytes", 0)
        assert isinstance(loaded, int) and isinstance(total, int)
        return Download(self.key, loaded, total)

    def outcome(self) -> Fetched | tuple[str, str]:
        """Of a process that has ended: what it fetched, or the reason and the message of its failure."""
        code, size = self._process.returncode, self._document.get("totalBytes")
        if code == 0 and isinstance(size, int):
            return Fetched(self.key, str(self._document.get("revision", "")), size)
        reason = _REASONS.get(code, Reason.MODEL_DOWNLOAD_FAILED)
        lines = self._complaints.decode(errors="replace").splitlines()
        said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
        if said:
            return reason.value, said[-1]
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return reason.value, f"The download was ended {how}. Look whether the container has memory enough."

    def complaints(self) -> str:
        """What it printed beside its progress, such as the place of an unexpected error."""
        return self._complaints.decode(errors="replace")

    def kill(self) -> None:
        """End it; a later one resumes what is there."""
        self.is_killed = True
        self._process.kill()

    def close(self) -> None:
        """Of a process that has ended: close the pipes."""
        self.output.close()
        self._errors.close()


def environment(entry: Entry, own: Mapping[str, str]) -> dict[str, str]:
    """The variables of a download. Raises ConfigError."""
    inherited = {name: value for name, value in own.items() if name in _INHERITED}
    files = {
        name: path for name, path in entry.files.items() if name not in _OPTIONAL or os.path.exists(path)
    }
    return {
        **inherited,
        **entry.environment,
        **{name: _content(name, path) for name, path in files.items()},
    }


def _content(name: str, path: str) -> str:
    """The content of a file with a credential, without the line break that editors add."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_CREDENTIAL_BYTES + 1)
        text = data.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"files.{name}: {path} cannot be read ({type(error).__name__}). Check the Secret and its key."
        ) from None
    if len(data) > _MAX_CREDENTIAL_BYTES or not text or "\0" in text:
        raise ConfigError(f"files.{name}: {path} is empty, or holds no text that a variable can have.")
    return text


def _drained(pipe: IO[bytes], before: bytes) -> tuple[bool, bytes]:
    """(whether the other end is closed, all that is there to read, the end of it where it is long)."""
    while chunk := pipe.read(65536):
        before = (before + chunk)[-_MAX_KEPT_BYTES:]
    return chunk is not None, before
