"""Refuses a limit of open files that is too low for the server's processes, before they start.

They inherit it. One that can open no further socket or file would leave the server unready, and nothing in
the log would say why.
"""

from __future__ import annotations

import resource

from quire_server.errors import ConfigError

LEAST_OPEN_FILES = 128  # libraries, sockets between processes, the model's files, some connections


def ensure_open_files() -> None:
    """Raise the soft limit where the hard one allows it. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        raise ConfigError(
            f"The limit is {hard} open files for each process (ulimit -n), and the server needs "
            f"{LEAST_OPEN_FILES}, and one more for each connection. Raise it: ulimit -n 4096, docker run "
            "--ulimit nofile=4096, or LimitNOFILE= of the container runtime's systemd unit."
        )
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
