"""The API process: `python -m quire_server.api RUN_DIR MODEL [flags]`. Started by the supervisor only.

Ends with 0 when a drain has ended, and with a reason when it cannot start.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `_run`: what is imported stays, and walking it takes a fifth of the start

import asyncio
import functools
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from prometheus_client import disable_created_metrics

from quire_http.drain import Drain, DrainLimits
from quire_http.malloc import return_memory
from quire_http.rate_limit import RateLimits, Rates
from quire_http.server import HttpServer, listen
from quire_server import config, fault_injection, log, termination
from quire_server.api.adapter_folder import AdapterFolder
from quire_server.api.admission import Admission, Limits
from quire_server.api.app import create_app
from quire_server.api.auth import Keys
from quire_server.api.context import ServerContext
from quire_server.api.deep_check import DeepCheck
from quire_server.api.gateway_tokens import GatewayKeys
from quire_server.api.ranks import read_ranks
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
from quire_server.text.output_parsers import TOOL_FORMS, families
from quire_server.text.output_parsers.reasoning import BEGIN, END
from quire_server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LAG_PERIOD_SECONDS = 0.1
# For how long the event loop waits for the interpreter's lock while another thread computes: at each of its
# rounds, of which a request takes several.
_SWITCH_SECONDS = 0.0005


def main(argv: list[str]) -> int:
    """Serve until a drain has ended; a failure leaves its reason for the supervisor."""
    run_dir = Path(argv[0])
    settings = config.parse_args(argv[1:], os.environ)
    log.configure("api", settings.log_level)
    return_memory()
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


def _tool_form(setting: str, template: str) -> str | None:
    if setting == "none":
        return None
    return families.tool_form_of(template) if setting == "auto" else setting.capitalize()


def _thinks(setting: str, template: str) -> bool:
    """Whether answers may begin with a thought."""
    return families.thinks(template) if setting == "auto" else setting == "think"


def build_context(settings: ServeConfig, run_dir: Path) -> ServerContext:
    """All parts of the API process."""
    metrics = Metrics(settings.served_names[0])
    limits_per_key = RateLimits(
        settings.max_requests_per_minute_per_key, settings.max_tokens_per_minute_per_key
    )
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
    template = ChatTemplate.load(settings.model, settings.chat_template)
    tool_form = _tool_form(settings.tool_call_parser, template.source)
    thinks = _thinks(settings.reasoning_parser, template.source)
    markers = () if tool_form is None else TOOL_FORMS[tool_form].markers
    return ServerContext(
        served_names=settings.served_names,
        task=settings.task,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        tool_form=tool_form,
        thinks=thinks,
        shown_tokens=tokenizer.special_tokens((*markers, *((BEGIN, END) if thinks else ()))),
        grammars=GrammarCompiler(tokenizer),
        defaults=sampling_defaults(files) if settings.generation_config == "auto" else SamplingDefaults(),
        metrics=metrics,
        admission=Admission(_limits(settings), time.monotonic, metrics.admitted),
        drain=Drain(DrainLimits(settings.drain_timeout_seconds, settings.pre_stop_seconds), time.monotonic),
        keys=Keys(settings.api_keys_dir, time.monotonic),
        gateway_keys=GatewayKeys(
            settings.gateway_keys_dir, settings.gateway_audience or "", time.monotonic, time.time
        ),
        state=state,
        thresholds=Thresholds(settings.stall_timeout_seconds, settings.canary_interval_seconds),
        deep_check=DeepCheck(engine),
        rates=Rates(lambda _: limits_per_key, time.monotonic),
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
        adapters_dir=settings.adapters_dir,
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
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"The API cannot listen on {host}:{port} ({error.strerror}): choose another --port or --host."
        ) from None


async def _serve(context: ServerContext, listener: socket.socket, *, max_age: float, faults: Faults) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, context.drain.begin)
    refused = functools.partial(context.metrics.refused, "too_many_connections")
    server = HttpServer(create_app(context), listener, max_connection_age=max_age, on_refusal=refused)
    serving = await server.start()
    beating = loop.create_task(_beat(context.state))
    # Only now: to the engine, and so to readiness, our connection means that we listen.
    connecting = loop.create_task(context.engine.run())
    watching = loop.create_task(_watch_lag(context.metrics.loop_lag))
    folder = context.adapters_dir
    if folder is not None:
        adapters = AdapterFolder(folder, context.engine, context.served_names)
        following = loop.create_task(adapters.run())
        serving.add_done_callback(lambda _: following.cancel())
    begin = loop.create_task(context.drain.wait_for_begin())
    await asyncio.wait({serving, connecting, begin}, return_when=asyncio.FIRST_COMPLETED)
    if not begin.done():
        for ended in (task for task in (serving, connecting) if task.done()):
            ended.result()  # raises what ended it
        raise RuntimeError("the HTTP server ended by itself")
    if faults.due("stuck_drain", float("inf")):
        await asyncio.Event().wait()
    await context.drain.wait_for_end(server.connections, lambda: _has_transfers(context.engine.stats))
    server.stop()
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
