"""The engine process: `python -m quire_server.engine RUN_DIR MODEL [flags]`. Started by the supervisor
only."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from pathlib import Path

from quire_server import config, exits, faults, log
from quire_server.config import ServeConfig
from quire_server.core.scheduler import Scheduler
from quire_server.engine import loading
from quire_server.engine.inbox import EngineSocket
from quire_server.engine.loop import Engine
from quire_server.engine.messages import EngineInfo
from quire_server.engine.pulse import Pulse
from quire_server.faults import Faults
from quire_server.health.heartbeat import SharedState

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Load, warm up, serve; a failure leaves its reason for the supervisor."""
    run_dir = Path(argv[0])
    settings = config.parse_args(argv[1:], os.environ)
    log.configure("engine", settings.log_level)
    pulse = Pulse(SharedState.open(run_dir), time.monotonic())
    try:
        _serve(settings, run_dir, pulse, faults.parse(os.environ))
    except Exception as error:  # the process boundary: everything becomes a reason and an exit code
        failure = exits.failure_of(error)
        logger.exception("the engine ends", extra={"reason": failure.reason.value})
        exits.leave_failure(run_dir, failure)
        return failure.exit_code
    return 0


def _serve(settings: ServeConfig, run_dir: Path, pulse: Pulse, switched: Faults) -> None:
    runner = loading.load(settings, pulse, switched)
    limits = loading.scheduler_config(settings, runner)
    info = EngineInfo(
        max_model_len=limits.max_model_len,
        vocab_size=runner.model_config.vocab_size,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        gpu_memory=tuple(runner.gpu_memory.items()),
        load_seconds=time.monotonic() - pulse.sample.started_at,
    )
    engine = Engine(
        Scheduler(limits, eos_token_ids=runner.model_config.eos_token_ids),
        runner,
        info=info,
        pulse=pulse,
        faults=switched,
        canary_interval=settings.canary_interval_seconds,
    )
    engine.warm_up()
    # What lives until here lives for ever: keep the collector from walking it on every pass.
    gc.collect()
    gc.freeze()
    logger.info("serving", extra={"model": str(settings.model), "kv_tokens": info.kv_capacity})
    engine.serve(EngineSocket(run_dir, info))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
