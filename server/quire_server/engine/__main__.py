"""The engine process: `python -m quire_server.engine RUN_DIR MODEL [flags]`, started by the supervisor."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: what is imported stays, and walking it takes a tenth of the start

import logging
import os
import sys
import time
from pathlib import Path

from quire_server import config, fault_injection, log, termination
from quire_server.config import ServeConfig
from quire_server.core.scheduler import Scheduler
from quire_server.engine import kv_roles, loading
from quire_server.engine.engine_core import EngineCore
from quire_server.engine.golden_tokens import GoldenTokens
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.engine.messages import EngineInfo
from quire_server.engine.proof import ProofOfInference
from quire_server.engine.socket_server import EngineSocket
from quire_server.fault_injection import Faults
from quire_server.health import engine_report
from quire_server.health.heartbeat import Process, SharedState

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Load, warm up, serve. A failure is left in the run directory for the supervisor."""
    run_dir = Path(argv[0])
    settings = config.parse_args(argv[1:], os.environ)
    log.configure("engine", settings.log_level)
    state = SharedState.open(run_dir)
    state.beat_by_thread(Process.ENGINE)
    heartbeat = HeartbeatWriter(state, time.monotonic())
    try:
        _serve(settings, run_dir, heartbeat, fault_injection.parse(os.environ))
    except Exception as error:  # the process boundary: every error becomes a reason and an exit code
        failure = termination.failure_of(error)
        logger.exception("the engine failed", extra={"reason": failure.reason.value})
        termination.leave_failure(run_dir, failure)
        return failure.exit_code
    return 0


def _serve(settings: ServeConfig, run_dir: Path, heartbeat: HeartbeatWriter, faults: Faults) -> None:
    if settings.task == "embed":
        _serve_vectors(settings, run_dir, heartbeat, faults)
        return
    runner = loading.load(settings, run_dir, heartbeat, faults)
    engine_report.write_effective_config(run_dir, loading.effective(settings, runner))
    limits = loading.scheduler_config(settings, runner)
    info = EngineInfo(
        max_model_len=limits.max_model_len,
        vocab_size=runner.model_config.vocab_size,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        gpu_memory=tuple(runner.gpu_memory.items()),
        load_seconds=time.monotonic() - heartbeat.sample.started_at,
        shares_prompts=limits.shares_prompts,
    )
    fingerprint = loading.canary_fingerprint(settings, runner)
    scheduler = Scheduler(limits, eos_token_ids=runner.model_config.eos_token_ids)
    engine = EngineCore(
        scheduler,
        runner,
        info=info,
        heartbeat=heartbeat,
        faults=faults,
        proof=_proof(settings),
        golden=GoldenTokens(settings.canary_golden_path, fingerprint),
        report_adapters=lambda states, unloaded: engine_report.write_adapters(
            run_dir, [state._asdict() for state in states], unloaded
        ),
        connector=kv_roles.connector(settings, scheduler, runner, faults),
    )
    _run(engine, settings, run_dir, info, fingerprint)


def _serve_vectors(settings: ServeConfig, run_dir: Path, heartbeat: HeartbeatWriter, faults: Faults) -> None:
    """As ``_serve``, for a model that embeds texts: the same scheduler and loop, and another runner."""
    runner = loading.load_pooling(settings, heartbeat, faults)
    engine_report.write_effective_config(run_dir, loading.effective(settings, runner))
    limits = loading.pooling_scheduler_config(settings, runner)
    info = EngineInfo(
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        gpu_memory=tuple(runner.gpu_memory.items()),
        load_seconds=time.monotonic() - heartbeat.sample.started_at,
        pooling=runner.pooling,
        embedding_size=runner.embedding_size,
    )
    fingerprint = loading.canary_fingerprint(settings, runner)
    engine = EngineCore(
        Scheduler(limits, eos_token_ids=()),
        runner,
        info=info,
        heartbeat=heartbeat,
        faults=faults,
        proof=_proof(settings),
        golden=GoldenTokens(settings.canary_golden_path, fingerprint),
    )
    _run(engine, settings, run_dir, info, fingerprint)


def _proof(settings: ServeConfig) -> ProofOfInference:
    return ProofOfInference(
        settings.canary_interval_seconds, settings.stall_timeout_seconds, time.monotonic()
    )


def _run(
    engine: EngineCore, settings: ServeConfig, run_dir: Path, info: EngineInfo, fingerprint: str
) -> None:
    """Warm up, and serve until the process is ended."""
    engine.warm_up()
    engine_report.write_canary(run_dir, fingerprint, engine.canary_tokens)
    # Objects that exist now live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    logger.info("serving", extra={"model": str(settings.model), "kv_tokens": info.kv_capacity})
    engine.serve(EngineSocket(run_dir, info))


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(sys.argv[1:]))
