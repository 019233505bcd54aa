"""A real server of the limit store, as a child process on a port of the loopback interface."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from e2e.cluster import valkey
from e2e.ports import free_ports
from e2e.waiting import eventually

ROOT = Path(__file__).parents[2]
PASSWORD = "a:pass/word"  # a URL has it quoted


class StoreServer:
    """A context manager. It keeps nothing on disk."""

    def __init__(self, directory):
        (self.port,) = free_ports(1)
        self._directory = directory
        self._process = None
        self.client = Redis(port=self.port, password=PASSWORD, protocol=2)
        self.url_file = directory / "url"
        self.write_url()
        self.start()

    def write_url(self, port=None, password="a%3Apass%2Fword"):
        """What the gateways' Secret has."""
        self.url_file.write_text(f"redis://:{password}@127.0.0.1:{port or self.port}/0\n")

    def start(self):
        options = ["--port", self.port, "--bind", "127.0.0.1", "--save", "", "--requirepass", PASSWORD]
        command = ["setpriv", "--pdeathsig", "KILL", *valkey.unpack(ROOT / ".cluster"), *map(str, options)]
        with (self._directory / "store.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=log)
        self.client.close()
        eventually("the store answers", self.answers)
        return self

    def answers(self):
        with contextlib.suppress(RedisError):
            return self.client.ping()
        return False

    def kill(self):
        self._process.kill()
        self._process.wait()
        self.client.close()

    def stop(self):
        """Hangs, with its port open."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
