"""The health process: `python -m quire_server.health RUN_DIR MODEL [flags]`, started by the supervisor."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from pathlib import Path

from quire_server import __version__, config, log, termination
from quire_server.health import engine_report
from quire_server.health.decision import Thresholds
from quire_server.health.fetched_adapters import FetchedAdapters
from quire_server.health.heartbeat import SharedState
from quire_server.health.server import HealthServer
from quire_server.termination import Failure, Reason


def main(argv: list[str]) -> int:
    """Serve the probes until the supervisor ends this process."""
    run_dir = Path(argv[0])
    settings = config.parse_args(argv[1:], os.environ)
    log.configure("health", settings.log_level)
    thresholds = Thresholds(
        settings.stall_timeout_seconds, settings.canary_interval_seconds, settings.local_ranks
    )
    try:
        server = HealthServer(
            (settings.host, settings.health_port), SharedState.open(run_dir), thresholds, __version__
        )
    except OSError as error:
        where = f"{settings.host}:{settings.health_port}"
        remedy = "choose another --health-port or --host"
        failure = Failure(
            Reason.CONFIG_ERROR, f"The health server cannot listen on {where} ({error.strerror}): {remedy}."
        )
        termination.leave_failure(run_dir, failure)
        return failure.exit_code
    server.read_model_config(settings.model)
    server.effective = partial(engine_report.read_effective_config, run_dir)
    server.canary = partial(engine_report.read_canary, run_dir)
    if settings.adapters_dir is not None:
        adapters = FetchedAdapters(settings.adapters_dir, lambda: settings.served_names)
        adapters.follow()
        server.adapters = lambda: adapters.merged(engine_report.read_adapters(run_dir))
    if settings.num_ranks > 1:
        own = dict.fromkeys(settings.local_ranks, socket.gethostname())
        server.topology = settings.topology(0)
        server.hosts = lambda: {**own, **engine_report.read_hosts(run_dir)}
    server.serve_forever(poll_interval=60)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
