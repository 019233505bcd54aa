"""etcd and kube-apiserver alone, on free ports of the loopback interface: ready in seconds, gone at the end
of the `with`.

For tests of what the API server itself decides (schema, CEL, defaults, RBAC, server-side apply). There are no
controllers but those that a test asks for: owner references collect nothing, namespaces never finish
deleting, no ServiceAccount is made by itself. Needs no root.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.cluster import control_plane, pki, programs
from e2e.cluster.client import Client, wait_until
from e2e.ports import free_ports

_ROOT = Path(__file__).parents[2]
# A fifth less CPU until kube-apiserver is ready, for 80 MB: Go collects garbage less often.
_FEWER_COLLECTIONS = {"GOGC": "400"}


class ApiServer:
    """A context manager; `kubeconfig` and `url` are the administrator's way in."""

    def __init__(self, bin_dir: Path = _ROOT / ".cluster" / "bin", *, extra: Sequence[str] = ()) -> None:
        self.bin_dir = bin_dir
        self._extra = tuple(extra)
        self._processes: list[subprocess.Popen[bytes]] = []
        etcd_port, peer_port, self._port = free_ports(3)
        self._etcd_url = f"http://127.0.0.1:{etcd_port}"
        self._peer_url = f"http://127.0.0.1:{peer_port}"
        self.url = f"https://127.0.0.1:{self._port}"
        self.directory = Path(tempfile.mkdtemp(prefix="quire-api-"))
        self.kubeconfig = self.directory / "kubeconfig"

    def __enter__(self) -> "ApiServer":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run_controllers(self, *names: str) -> None:
        """kube-controller-manager with these controllers, each with the rights that Kubernetes gives it."""
        keys = self.directory / "pki"
        self._spawn(
            "kube-controller-manager",
            [
                str(self.bin_dir / "kube-controller-manager"),
                f"--kubeconfig={self.kubeconfig}",
                f"--controllers={','.join(names)}",
                "--leader-elect=false",
                "--secure-port=0",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={keys}/sa.key",
                "--horizontal-pod-autoscaler-sync-period=1s",
            ],
        )

    def _start(self) -> None:
        programs.build(self.bin_dir, ("kube",))
        keys = self.directory / "pki"
        authority = pki.Authority(keys)
        authority.issue(pki.api_server_identity([]))
        authority.issue(pki.admin_identity())
        authority.issue(control_plane.front_proxy_identity())
        authority.issue_token_key()
        self.kubeconfig.write_text(pki.kubeconfig(keys, "admin", self.url))
        data = self.directory / "etcd"
        self._spawn(
            "etcd", control_plane.etcd(self.bin_dir, data, client_url=self._etcd_url, peer_url=self._peer_url)
        )
        settings = control_plane.ApiServerSettings(
            bin_dir=self.bin_dir,
            pki=keys,
            etcd_url=self._etcd_url,
            bind_address="127.0.0.1",
            port=self._port,
            services=IPv4Network("10.0.0.0/16"),  # a Service each for a thousand LLMDeployments
            # Nothing makes a ServiceAccount here, so that its admission would refuse every pod.
            extra=(
                "--disable-admission-plugins=ServiceAccount",
                *control_plane.front_proxy(keys),
                *self._extra,
            ),
        )
        self._api_server = control_plane.api_server(settings)
        self.start_api()

    def kill_api(self) -> None:
        """SIGKILL kube-apiserver; etcd stays."""
        process = self._named("kube-apiserver")
        process.kill()
        process.wait()
        self._processes.remove(process)

    def start_api(self) -> None:
        """Start kube-apiserver, for the first time or again, and wait until it is ready."""
        self._spawn("kube-apiserver", self._api_server)
        client = Client(self.url, self.directory / "pki")
        wait_until(
            "kube-apiserver",
            lambda: client.is_ready() and client.exists("/api/v1/namespaces/default"),
            seconds=60,
            death=self._first_death,
        )

    def compact(self) -> None:
        """Make etcd forget every state of every object but the present one."""
        seen = self._etcd("kv/range", {"key": base64.b64encode(b"/").decode()})
        self._etcd("kv/compaction", {"revision": seen["header"]["revision"], "physical": True})

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """While the block runs, kube-apiserver accepts connections and says nothing."""
        process = self._named("kube-apiserver")
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def _named(self, name: str) -> "subprocess.Popen[bytes]":
        (found,) = (process for process in self._processes if name in _program(process))
        return found

    def _etcd(self, call: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self._etcd_url}/v3/{call}", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def _spawn(self, name: str, argv: list[str]) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            # The kernel ends them when this process dies, however it dies.
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
            self._processes.append(
                subprocess.Popen(
                    argv,
                    env=os.environ | _FEWER_COLLECTIONS,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _first_death(self) -> str | None:
        for process in self._processes:
            if process.poll() is not None:
                name = _program(process)
                log = self.directory / f"{name}.log"
                return f"{name} exited with {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}"
        return None

    def _stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


def _program(process: "subprocess.Popen[bytes]") -> str:
    assert isinstance(process.args, list)
    return Path(str(process.args[3])).name
