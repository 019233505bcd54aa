"""The real program, `quire-server serve`, as a child process on free ports of the loopback interface."""

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from e2e.failure_paths import recorder
from e2e.ports import free_ports
from quire_server import fault_injection

# No server here speaks TLS; without this every call would read the list of authorities first, in 20 ms.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

HANG_SECONDS = 120  # against hangs, never a bar for a time: everything else runs on this machine as well


class Server:
    """A running server. `directory` takes its log and its termination log. A test with a `fault` fails where
    the fault takes no effect. `within`: a command that runs it elsewhere, in the same process. `ports`: of
    the API and of its health, where they cannot be any.
    """

    def __init__(self, model, directory, *flags, fault="", within=(), ports=(), **environ):
        self.port, self.health_port = ports or free_ports(2)
        self.termination_log = directory / "termination-log"
        self.termination_log.touch()
        self.log = directory / "log"
        self._faults = {part.strip().split(":")[0].split(",")[0] for part in fault.split(";") if part}
        argv = [
            *within,
            *("setpriv", "--pdeathsig", "KILL"),  # an interrupted test run leaves no server
            *(sys.executable, "-m", "quire_server", "serve", str(model)),
            *("--port", str(self.port), "--health-port", str(self.health_port), "--device", "cpu"),
            *("--served-model-name", "tiny,alias", *self._cache(flags), *flags),
        ]
        environ["QUIRE_TERMINATION_LOG"] = str(self.termination_log)
        faults = {"QUIRE_FAULT": fault, "QUIRE_ALLOW_FAULTS": "1"} if fault else {}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, env={**os.environ, "OMP_NUM_THREADS": "1", **faults, **environ}, stdout=log, stderr=log
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.health_url = f"http://127.0.0.1:{self.health_port}"

    @staticmethod
    def _cache(flags):
        """A small KV cache, where there is one."""
        return () if "embed" in flags else ("--kv-cache-memory-bytes", str(8 << 20))

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        if self.process.poll() is None:
            self.terminate()  # twice means now, and leaves nothing behind
            time.sleep(0.1)
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.process.kill()
        self.process.wait(10)
        assert kind or self._faults <= self.faults(), f"{self._faults - self.faults()} took no effect"

    def wait(self, what, condition, seconds=HANG_SECONDS):
        """Poll until `condition` is true; its value is returned."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)
        return value

    def wait_ready(self, seconds=HANG_SECONDS):
        self.wait("ready", lambda: self.ended() or self.probe("readyz") == 200, seconds)
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return self

    def wait_end(self, seconds=HANG_SECONDS):
        """The exit code, once the process has ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.log.read_text()[-3000:]}") from None

    def faults(self):
        """The faults that took effect, by the log of the server."""
        lines = [
            line for line in self.log.read_text().splitlines() if f'"{fault_injection.INJECTED}"' in line
        ]
        took_effect = {json.loads(line)["fault"] for line in lines}
        for fault in took_effect:
            recorder.record("fault", fault)
        return took_effect

    def wait_fault(self, name, seconds=HANG_SECONDS):
        """Wait until the fault took effect."""
        self.wait(f"{name} took effect", lambda: name in self.faults(), seconds)

    def ended(self):
        return self.process.poll() is not None

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def failure(self):
        """The termination log."""
        failure = json.loads(self.termination_log.read_text())
        recorder.record("termination", failure["reason"])
        return failure

    def probe(self, name):
        """The status of a probe, None when the server does not answer."""
        with contextlib.suppress(httpx.TransportError):
            return self._get(f"{self.health_url}/{name}").status_code
        return None

    def reaches(self, path):
        """Whether the API answers there."""
        with contextlib.suppress(httpx.TransportError):
            return self._get(self.url + path).is_success
        return False

    def reason(self, name):
        return self._get(f"{self.health_url}/{name}").json()["reason"]

    def statusz(self):
        return self._get(f"{self.health_url}/statusz").json()

    def post(self, path, body, key="none", **more):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, verify=NO_TLS, **more)

    def client(self, key="none"):
        http = DefaultHttpxClient(verify=NO_TLS)
        return OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60, http_client=http)

    def async_client(self, key="none"):
        http = DefaultAsyncHttpxClient(verify=NO_TLS)
        return AsyncOpenAI(
            base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60, http_client=http
        )

    def metric(self, name, **labels):
        """The value of one sample of /metrics."""
        text = self._get(self.url + "/metrics").text
        for line in text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                return float(match[2])
        raise AssertionError(f"no sample {name} {labels}")

    @staticmethod
    def _get(url):
        return httpx.get(url, timeout=5, verify=NO_TLS)

    def children(self):
        """Pids of the supervisor's children by the name of their process."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = {}
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended since the kernel listed it
            if len(command) > 3:
                name = command[3].decode().removeprefix("quire_server.")
                named[f"rank {command[4].decode()}" if name == "engine.rank" else name] = int(pid)
        return named

    def ranks(self):
        """Pids of the processes that compute, by rank."""
        return {
            int(rank) if rank else 0: pid
            for name, pid in self.children().items()
            for kind, _, rank in [name.partition(" ")]
            if kind in ("engine", "rank")
        }

    def run_dir(self):
        """The directory that the processes of this server share."""
        pid = self.children()["engine"]
        return Path(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[4].decode())
