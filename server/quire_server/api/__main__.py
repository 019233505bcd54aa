"""The API process: `python -m quire_server.api RUN_DIR MODEL [flags]`. Started by the supervisor only.

Ends with 0 when a drain has ended, and with a reason when it cannot start.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `_run`: what is imported stays, and walking it takes a fifth of the start

import asyncio
import contextlib
import ctypes
import functools
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from quire_server import config, fault_injection, log, termination
from quire_server.api.admission import Admission, Limits
from quire_server.api.app import create_app
from quire_server.api.auth import Keys
from quire_server.api.connection_limit import ConnectionLimit, raise_file_limit
from quire_server.api.context import ServerContext
from quire_server.api.deep_check import DeepCheck
from quire_server.api.drain import Drain, DrainLimits
from quire_server.api.http_protocol import Connection
from quire_server.api.parser_turns import ParserTurns
from quire_server.api.ranks import read_ranks
from quire_server.api.rate_limit import RateLimits, Rates
from quire_server.api.request_log import RequestLog, RequestLogging, read_patterns
from quire_server.api.tracing import Tracing
from quire_server.config import ServeConfig
from quire_server.core.policy import Policy
from quire_server.core.stats import EngineStats
from quire_server.core.watermark import WatermarkMode
from quire_server.engine.client import EngineClient
from quire_server.engine.messages import EngineInfo
from quire_server.engine.socket_server import SOCKET_NAME
from quire_server.errors import ConfigError, QuireServerError
from quire_server.fault_injection import Faults
from quire_server.health import engine_report
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import BEAT_SECONDS, Process, SharedState
from quire_server.metrics.requests import CacheFacts, Metrics
from quire_server.model_dir.files import ModelFiles
from quire_server.model_dir.generation_config import SamplingDefaults, sampling_defaults
from quire_server.text.chat import ChatTemplate
from quire_server.text.grammar_compiler import GrammarCompiler
from quire_server.text.long_texts import LongTexts
from quire_server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that the client is the one who closes.
_KEEP_ALIVE_SECONDS = 75
_LAG_PERIOD_SECONDS = 0.1
# Connections that one round of the event loop accepts. It accepts one of each listening socket, so that a
# client's would wait for a round for each one that came before: the one socket has several descriptors.
_ACCEPTS_PER_ROUND = 8
# A peer that has vanished (a lost node, a pulled cable) says nothing: its connection is closed when it has
# acknowledged nothing for so long. gRPC waits as long by default.
_LOST_PEER_SECONDS = 20
_PROBE_SECONDS = 5
# For how long the event loop waits for the interpreter's lock while another thread computes: at each of its
# rounds, of which a request takes several.
_SWITCH_SECONDS = 0.0005
# Parameters of glibc's mallopt, and their values.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MALLOC = {_M_MMAP_THRESHOLD: 512 << 10, _M_TRIM_THRESHOLD: 1 << 20, _M_ARENA_MAX: 2}


def main(argv: list[str]) -> int:
    """Serve until a drain has ended; a failure leaves its reason for the supervisor."""
    run_dir = Path(argv[0])
    settings = config.parse_args(argv[1:], os.environ)
    log.configure("api", settings.log_level)
    _return_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not annotate it
    try:
        _run(settings, run_dir)
    except Exception as error:  # the process boundary: everything becomes a reason and an exit code
        failure = termination.failure_of(error)
        unexpected = not isinstance(error, QuireServerError)
        logger.error(failure.message, extra={"reason": failure.reason.value}, exc_info=unexpected)
        termination.leave_failure(run_dir, failure)
        return failure.exit_code
    return 0


def _run(settings: ServeConfig, run_dir: Path) -> None:
    """Read the texts of the model, listen, serve."""
    context = build_context(settings, run_dir)
    listener = _listen(settings.host, settings.port)
    # What lives until here lives for ever: keep the collector from walking it on every pass.
    gc.collect()
    gc.freeze()
    gc.enable()
    faults = fault_injection.parse(os.environ)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            max_age = settings.max_connection_age_seconds
            runner.run(_serve(context, listener, max_age=max_age, faults=faults))
    finally:
        context.template.close()
        context.grammars.close()
        if context.long_texts is not None:
            context.long_texts.close()
        context.tracing.close()


def _return_memory() -> None:
    """Have what large bodies took returned to the system when they are gone. By default glibc keeps pieces of
    up to 32 MiB, in each of many arenas, and one small object behind them keeps them all.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        for parameter, value in _MALLOC.items():
            libc.mallopt(parameter, value)


def build_context(settings: ServeConfig, run_dir: Path) -> ServerContext:
    """All parts of the API process."""
    metrics = Metrics(settings.served_names[0])
    files = ModelFiles.open(settings.model)
    tokenizer = Tokenizer.load(settings.model)
    engine = EngineClient(
        run_dir / SOCKET_NAME,
        lambda outbox: metrics.step(outbox.stats),
        lambda info: metrics.engine_known(
            info.max_model_len, _cache_facts(settings, info), dict(info.gpu_memory), info.load_seconds
        ),
    )
    if settings.device != "cpu":
        metrics.gpus.watch()
    state = SharedState.open(run_dir)
    hosts = functools.partial(engine_report.read_hosts, run_dir)
    metrics.ranks.read = functools.partial(read_ranks, settings, state, hosts)
    return ServerContext(
        served_names=settings.served_names,
        engine=engine,
        tokenizer=tokenizer,
        template=ChatTemplate.load(settings.model, settings.chat_template),
        grammars=GrammarCompiler(tokenizer),
        defaults=sampling_defaults(files) if settings.generation_config == "auto" else SamplingDefaults(),
        metrics=metrics,
        admission=Admission(_limits(settings), time.monotonic, metrics.admitted),
        drain=Drain(DrainLimits(settings.drain_timeout_seconds, settings.pre_stop_seconds), time.monotonic),
        keys=Keys(settings.api_keys_dir, time.monotonic),
        state=state,
        thresholds=Thresholds(settings.stall_timeout_seconds, settings.canary_interval_seconds),
        deep_check=DeepCheck(engine),
        rates=Rates(
            RateLimits(
                settings.max_requests_per_minute_per_key,
                settings.max_tokens_per_minute_per_key,
            ),
            time.monotonic,
        ),
        tracing=_tracing(settings),
        request_log=RequestLog(
            RequestLogging(settings.log_requests),
            read_patterns(settings.log_redact_path),
            settings.max_log_len,
        ),
        with_docs=not settings.disable_fastapi_docs,
        with_priorities=settings.scheduling_policy == Policy.PRIORITY,
        request_timeout=settings.request_timeout_seconds or math.inf,
        watermark=WatermarkMode(settings.watermark),
        long_texts=LongTexts(settings.model),
    )


def _tracing(settings: ServeConfig) -> Tracing:
    if settings.otlp_endpoint is None:
        return Tracing.off()
    return Tracing.over_otlp(settings.otlp_endpoint, settings.trace_sample_ratio)


def _cache_facts(settings: ServeConfig, info: EngineInfo) -> CacheFacts:
    return CacheFacts(
        info.block_size, info.num_blocks, settings.kv_cache_dtype, settings.enable_prefix_caching
    )


def _limits(settings: ServeConfig) -> Limits:
    return Limits(settings.max_num_queued_reqs, settings.max_num_queued_tokens, settings.max_num_reqs_per_key)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on exactly the address that was asked for."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_lost_peers(listener)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"The API cannot listen on {host}:{port} ({error.strerror}): choose another --port or --host."
        ) from None
    return listener


def _notice_lost_peers(listener: socket.socket) -> None:
    """Set what accepted connections inherit: probes of idle ones, a limit for what stays unacknowledged."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_PEER_SECONDS // 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _LOST_PEER_SECONDS // 2 // _PROBE_SECONDS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_PEER_SECONDS)


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals: it would hang up on clients where we drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the drain."""
        yield


async def _serve(context: ServerContext, listener: socket.socket, *, max_age: float, faults: Faults) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, context.drain.begin)
    refused = functools.partial(context.metrics.refused, "too_many_connections")
    limit = ConnectionLimit(raise_file_limit(), refused)
    server = _Server(
        uvicorn.Config(
            create_app(context),
            http=functools.partial(  # type: ignore[arg-type]  # uvicorn only calls it
                Connection, max_age=max_age, limit=limit, turns=ParserTurns()
            ),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
    )
    listeners = [listener, *(listener.dup() for _ in range(_ACCEPTS_PER_ROUND - 1))]
    serving = loop.create_task(server.serve(sockets=listeners))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    beating = loop.create_task(_beat(context.state))
    # Only now: to the engine, and so to readiness, our connection means that we listen.
    connecting = loop.create_task(context.engine.run())
    watching = loop.create_task(_watch_lag(context.metrics.loop_lag))
    begin = loop.create_task(context.drain.wait_for_begin())
    await asyncio.wait({serving, connecting, begin}, return_when=asyncio.FIRST_COMPLETED)
    if not begin.done():
        for ended in (task for task in (serving, connecting) if task.done()):
            ended.result()  # raises what ended it
        raise RuntimeError("the HTTP server ended by itself")
    if faults.due("stuck_drain", float("inf")):
        await asyncio.Event().wait()
    await context.drain.wait_for_end(lambda: _clients(server), lambda: _has_transfers(context.engine.stats))
    server.should_exit = True
    await serving
    connecting.cancel()
    watching.cancel()
    beating.cancel()


async def _beat(state: SharedState) -> None:
    """Show the health process that the event loop runs."""
    while True:
        state.beat(Process.API)
        await asyncio.sleep(BEAT_SECONDS)


async def _watch_lag(observe: Callable[[float], None]) -> None:
    """Report ten times a second by how many seconds the event loop ran a timer late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_PERIOD_SECONDS
        await asyncio.sleep(_LAG_PERIOD_SECONDS)
        observe(max(0.0, loop.time() - due))


def _has_transfers(stats: EngineStats) -> bool:
    """Whether prefixes are computed here for other servers, or wait to be read by them."""
    return bool(stats.transfers.computing or stats.transfers.held)


def _clients(server: uvicorn.Server) -> list[Connection]:
    return [one for one in server.server_state.connections if isinstance(one, Connection)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
