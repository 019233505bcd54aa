"""The operator's process, started as its container would start it, with the RBAC of the chart.

`Replica` is shared with the tests of the metrics adapter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from e2e.failure_paths import import_hook
from e2e.operator.world import World
from e2e.ports import free_port
from e2e.waiting import eventually

ROOT = Path(__file__).parents[2]


# As in a pod, but for the place where the kubelet puts the ServiceAccount's files.
_IN_POD = """
import pathlib, sys
from quire_operator import __main__
from quire_operator.cluster import connection
connection.SERVICE_ACCOUNT = pathlib.Path(sys.argv[1])
sys.exit(__main__.main(["run"]))
"""


class Replica:
    """A process of the operator's image: `arguments` are Python's. `port` serves metrics and probes."""

    def __init__(
        self, name: str, arguments: Sequence[str], directory: Path, port: int, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.port = port
        self.log = directory / f"{name}.log"
        self._environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "operator"),
            "POD_NAME": name,
            "POD_NAMESPACE": "quire-system",
            **import_hook.environment(str(ROOT / "operator")),
            **environ,
        }
        # An interrupted test run leaves no operator.
        self._command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stderr=log, stdout=log)
        return self

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit status, None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def suspend(self) -> None:
        """SIGSTOP; returns once it has taken effect."""
        self.send(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(f"{self.name} is stopped", lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout=seconds)

    def stop(self) -> None:
        """SIGTERM as the kubelet sends it; SIGKILL when it takes too long."""
        if self.code is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            assert self._process is not None
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                raise

    def kill(self) -> None:
        if self.code is None:
            self.send(signal.SIGKILL)
            self.wait(10)

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of one of its HTTP pages; status 0 while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """Its metrics by name and labels; empty while nothing answers."""
        lines = (line.rpartition(" ") for line in self.ask("/metrics")[1].splitlines() if line[:1] != "#")
        return {name: float(value) for name, _, value in lines}

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class OperatorProcess(Replica):
    """One replica. `name` is its POD_NAME and so its identity in the Lease.

    `credentials`: a kubeconfig, or the directory of a ServiceAccount's files.
    """

    def __init__(self, name: str, credentials: Path, directory: Path, **environ: str) -> None:
        port = free_port()
        program = (
            ["-c", _IN_POD, str(credentials)] if credentials.is_dir() else ["-m", "quire_operator", "run"]
        )
        given = {
            **({} if credentials.is_dir() else {"KUBECONFIG": str(credentials)}),
            "QUIRE_ENGINE_IMAGE": "registry.example/quire-server:1",
            "QUIRE_CREDENTIAL_HOSTS": "*.example.com",
            "QUIRE_METRICS_PORT": str(port),
            **environ,
        }
        super().__init__(name, program, directory, port, given)

    def wait_leading(self, world: World) -> OperatorProcess:
        eventually(
            f"{self.name} leads\n{self.tail()}",
            lambda: world.lease_holder() == self.name or self.code is not None,
        )
        assert self.code is None, self.tail()
        return self
