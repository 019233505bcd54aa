"""The real gateway, `python -m quire_gateway`, as a child process on a port of the loopback interface."""

import contextlib
import json
import os
import subprocess
import sys

import httpx

from e2e.ports import free_ports
from tests.gateway.kube_stub import NAMESPACE
from tests.server.launch import Server

# To read the system's takes a fifth of a start.
NO_AUTHORITIES = {"SSL_CERT_FILE": os.devnull}


class Gateway(Server):
    """A running gateway, with the handle that the tests have of a server: its URL, its log, its metrics."""

    def __init__(self, kube_api, directory, **environ):
        (self.port,) = free_ports(1)
        self.log = directory / "gateway.log"
        self._faults = set()
        pod_namespace = environ.pop("POD_NAMESPACE", "")
        environ = {f"QUIRE_GATEWAY_{name}": str(value) for name, value in environ.items()}
        environ |= {
            "QUIRE_GATEWAY_NAMESPACES": NAMESPACE,
            "QUIRE_GATEWAY_KUBE_API": kube_api,
            "QUIRE_GATEWAY_HOST": "127.0.0.1",
            "QUIRE_GATEWAY_PORT": str(self.port),
            "POD_NAMESPACE": pod_namespace,
        }
        argv = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "quire_gateway"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, env={**os.environ, **NO_AUTHORITIES, **environ}, stdout=log, stderr=log
            )
        self.url = self.health_url = f"http://127.0.0.1:{self.port}"

    def replicas(self, state="ready", model="tiny"):
        """How many of them are in a state."""
        if self.ended():
            raise RuntimeError(f"the gateway ended\n{self.log.read_text()[-3000:]}")
        with contextlib.suppress(AssertionError, httpx.TransportError):  # neither known nor listening yet
            return self.metric("gateway_replicas", model=model, state=state)
        return 0

    def wait_replicas(self, number, state="ready", seconds=120.0):
        """Wait until the gateway knows so many."""
        self.wait(f"{number} replicas are {state}", lambda: self.replicas(state) == number, seconds)
        self.wait("all kinds are listed", lambda: self.probe("readyz") == 200, seconds)
        return self

    def requests(self):
        """The access log as it is: the line of a request may follow its answer."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["message"] == "request"]

    def wait_requests(self, number, before=0):
        """The lines of so many requests that came after these."""
        self.wait("a line of each request", lambda: len(self.requests()) >= before + number)
        return self.requests()[before:]
