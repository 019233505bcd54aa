"""`python -m quire_batch`: serves the API, and does the work until it is stopped."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: what is imported stays, and walking it takes a tenth of the start

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from prometheus_client import disable_created_metrics

from quire_batch import schema
from quire_batch.api import application
from quire_batch.contents import Contents
from quire_batch.context import Context
from quire_batch.gateway_client import GatewayClient
from quire_batch.identity import GatewayTokens
from quire_batch.line_runner import LineRunner
from quire_batch.metrics import Metrics
from quire_batch.patience import Patience, brief
from quire_batch.processor import Processor
from quire_batch.records import incarnation
from quire_batch.schema import SchemaError
from quire_batch.settings import Settings
from quire_batch.space import Space
from quire_batch.store import STORE_ERRORS, Store
from quire_batch.tables import DatabaseUrlError, connect
from quire_batch.webhook_sender import WebhookSender
from quire_http import json_log
from quire_http.environ import SettingsError
from quire_http.server import HttpServer, listen
from quire_http.signed_token import TrustedKeys

logger = logging.getLogger(__name__)


def main() -> int:
    """The exit code."""
    gc.freeze()
    gc.enable()
    try:
        settings = Settings.from_environ(os.environ)
        spool = settings.directory / "uploads"
        _make_spool(spool)
        engine = connect(settings.database_url or f"sqlite:///{settings.directory / 'batches.sqlite'}")
        schema.prepare(engine)
        store = Store(engine)
        listener = listen(settings.host, settings.port)
    except DatabaseUrlError as error:
        return _failed(f"QUIRE_BATCH_DATABASE_URL_FILE: {error}", 2)
    except (SettingsError, OSError) as error:
        return _failed(str(error), 2)
    except SchemaError as error:
        return _failed(f"the database: {error}", 2)
    except STORE_ERRORS as error:
        return _failed(f"the database: {brief(error)}", 1)
    json_log.configure("batch", settings.log_level)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not annotate it
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, store, listener))
    return 0


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201  # before there is a log
    return code


def _make_spool(spool: Path) -> None:
    """Where uploads are while they come; those of a process that has died go."""
    spool.mkdir(parents=True, exist_ok=True)
    for left in spool.iterdir():
        left.unlink()
    tempfile.tempdir = str(spool)


def _contents(settings: Settings) -> Contents:
    if settings.bucket:
        return Contents.in_bucket(settings.bucket, settings.bucket_endpoint)
    return Contents.in_directory(settings.directory / "files")


async def _serve(settings: Settings, store: Store, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ending, wake = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    contents, metrics = _contents(settings), Metrics(store.counts)
    is_elsewhere = bool(settings.database_url and settings.bucket)
    space = Space(None if is_elsewhere else settings.directory)
    patience = Patience(metrics)
    gateway = GatewayClient(settings.gateway_url)
    worker = incarnation(settings.worker)
    runner = LineRunner(store, space, gateway, metrics, settings, worker, patience, wake.set)
    processor = Processor(store, contents, space, runner, metrics, settings, worker, patience, wake)
    tokens = GatewayTokens(TrustedKeys(settings.keys_directory, time.monotonic))
    context = Context(
        store=store,
        contents=contents,
        space=space,
        tokens=tokens,
        metrics=metrics,
        settings=settings,
        wake=lambda: loop.call_soon_threadsafe(wake.set),
        is_ready=lambda: not ending.is_set(),
    )
    server = HttpServer(application(context), listener, max_connection_age=math.inf, on_refusal=lambda: None)
    serving = await server.start()
    work = [loop.create_task(processor.run())]
    if settings.webhooks:
        work.append(loop.create_task(WebhookSender(store, metrics, settings, patience).run()))
    end = loop.create_task(ending.wait())
    await asyncio.wait({serving, end, *work}, return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        task.cancel()
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    server.stop()
    await serving
    await gateway.close()


if __name__ == "__main__":
    sys.exit(main())
