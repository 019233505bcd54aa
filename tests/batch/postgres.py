"""A real PostgreSQL of Debian's, on a Unix socket alone, as a user without rights."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from e2e.cluster import postgresql
from tests.batch.launch import wait

ROOT = Path(__file__).parents[2]
_UNPRIVILEGED = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


class Postgres:
    """A context manager: a server with an empty database."""

    def __init__(self, directory):
        self._programs = postgresql.unpack(ROOT / ".cluster")
        self._bin = self._programs.bin
        self._directory = directory
        self._as = _UNPRIVILEGED if os.geteuid() == 0 else ()
        self.data, self._socket = directory / "data", directory / "socket"
        self.log = directory / "postgres.log"
        self.url = f"postgresql://postgres@/postgres?host={self._socket}"

    def __enter__(self):
        for path in (self._directory, self._socket):
            path.mkdir(parents=True, exist_ok=True)
            if self._as:
                shutil.chown(path, 65534, 65534)
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
        argv = [*self._as, *map(str, (self._bin / "initdb", "-D", self.data, *options))]
        subprocess.run(argv, check=True, capture_output=True, cwd="/", timeout=120, env=self._environ())
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self):
        options = (
            "-c",
            "listen_addresses=",
            "-c",
            "jit=off",
            "-c",
            f"unix_socket_directories={self._socket}",
        )
        program = ("setpriv", "--pdeathsig", "KILL", self._bin / "postgres", "-D", self.data)
        argv = [*self._as, *program, *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(map(str, argv)), stdout=log, stderr=log, cwd="/", env=self._environ()
            )
        wait("PostgreSQL answers", self._answers)
        return self

    def stop(self):
        """At once, with every connection cut."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(120)

    def _answers(self):
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        ready = [self._bin / "pg_isready", "-h", self._socket]
        done = subprocess.run(list(map(str, ready)), capture_output=True, check=False, env=self._environ())
        return done.returncode == 0

    def _environ(self):
        libraries = self._programs.libraries
        return {**os.environ, **({"LD_LIBRARY_PATH": str(libraries)} if libraries else {})}
