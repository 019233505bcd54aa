"""The kopf shell of the operator: it logs in, lists and watches, and hands every event to the controller.

`main` is what `quire-operator run` starts: probes and metrics at once, then leader election, and kopf only
while leading. The handlers keep no state, so kopf writes nothing to any object: no annotation, no finalizer,
no Event.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import kopf

from quire_operator import names
from quire_operator.cluster import Cluster, Connection, LeaseClient, kinds
from quire_operator.controller import Controller
from quire_operator.errors import QuireOperatorError
from quire_operator.lease import Election, LeadershipLostError, Terms
from quire_operator.metrics import Metrics, serve
from quire_operator.settings import Settings
from quire_operator.unreadable import UnreadableObjects

logger = logging.getLogger(__name__)

EXIT_UNUSABLE = 2
EXIT_LOST = 1
STOP_SECONDS = 5.0  # to finish the writes in progress

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_BUFFER_BYTES = 64 * 1024


class EndlessBackoffs:
    """Seconds between attempts while the API server is unreachable. Endless, or kopf would end the
    process.
    """

    def __iter__(self) -> Iterator[float]:
        for seconds in (0.5, 1, 2):
            yield seconds * random.uniform(0.8, 1.2)
        while True:
            yield random.uniform(2, 4)


def main() -> int:
    """Run the operator until SIGTERM; the exit status of the process."""
    try:
        settings = Settings.from_environ(os.environ)
        logging.basicConfig(
            level=settings.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
        logging.getLogger().handlers[0].addFilter(is_logged)
        _tune_garbage_collection()
        allocate_large_buffers_with_mmap()
        return asyncio.run(_run(settings))
    except QuireOperatorError as error:
        sys.stderr.write(f"quire-operator: {error}\n")
        return EXIT_UNUSABLE


def _tune_garbage_collection() -> None:
    """Collect cycles rarely: the objects that a re-list parses have none, and searching them took a quarter
    of its CPU time.
    """
    gc.freeze()
    gc.set_threshold(5_000, 20)


def allocate_large_buffers_with_mmap() -> None:
    """Fix glibc's mmap threshold, so that the memory of each large buffer is returned when it is freed. By
    default glibc raises the threshold after the first free and takes later buffers from the heap, which the
    long-lived cache entries between them fragment, so that it grows.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not musl's
        libc.mallopt(_M_MMAP_THRESHOLD, _BUFFER_BYTES)


def is_logged(record: logging.LogRecord) -> bool:
    """False for the error that kopf's watches log every few seconds where a right is missing: the re-list
    logs it once, with the missing rule.
    """
    return not (record.name.startswith("kopf.") and "APIForbiddenError" in record.getMessage())


async def _run(settings: Settings) -> int:
    """Serve probes, wait for the Lease, run the controller."""
    stop = asyncio.Event()
    _stop_on_signals(stop)
    metrics = Metrics()
    connection = await Connection.open(report=UnreadableObjects(metrics.unreadable_objects))
    election = _election(connection, settings)
    cluster = Cluster(connection, fence=election.fence, instance=settings.pod_name)
    metrics.leader.set_function(lambda: float(election.leads))
    controller = Controller(cluster, settings, metrics)
    try:
        async with serve(metrics, settings.metrics_port, controller.health):
            if not await _is_elected(election, stop):
                return 0
            await _lead(settings, controller, connection, election, stop)
    finally:
        await connection.close()


async def _lead(
    settings: Settings,
    controller: Controller,
    connection: Connection,
    election: Election,
    stop: asyncio.Event,
) -> NoReturn:
    """Run while the Lease is held; then finish the writes in progress, release the Lease, and exit."""
    kopf_ready = asyncio.Event()
    watching = kopf.operator(
        registry=registry(controller, connection),
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
        standalone=True,
        ready_flag=kopf_ready,
    )
    tasks: dict[str, asyncio.Task[Any]] = {
        "lease": asyncio.create_task(election.hold()),
        "controller": asyncio.create_task(_work(controller)),
        "stop": asyncio.create_task(stop.wait()),
    }
    # kopf cancels every task that was created after it, so it is started last.
    tasks["watches"] = asyncio.create_task(watching)
    tasks["signals"] = asyncio.create_task(_restore_signal_handlers(kopf_ready, stop))
    ended = await _until_one_ends(tasks)
    if ended == "lease":
        _die(tasks["lease"])
    code = 0 if ended == "stop" else 1
    if code:
        logger.error("%s ended: %r", ended, tasks[ended].exception() or "without an error")
    tasks["lease"].cancel()
    tasks["controller"].cancel()
    await asyncio.wait([tasks["controller"]], timeout=STOP_SECONDS)
    await election.release()
    _end(code)


async def _work(controller: Controller) -> None:
    await controller.prime()
    await controller.run()


def registry(controller: Controller, connection: Connection) -> kopf.OperatorRegistry:
    """The handlers that kopf calls: login, settings, and one for the events of every kind."""
    handlers = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        session = await connection.watch_session()
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)

    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)

    kopf.on.login(registry=handlers)(login)
    kopf.on.startup(registry=handlers)(startup)
    for kind in kinds.WATCHED:
        version = kind.api_version.rpartition("/")[2]
        # Items of a list have no kind; the handler of each kind adds it.
        known = {"apiVersion": kind.api_version, "kind": kind.kind}

        async def on_event(event: Any, known: dict[str, str] = known, **_: Any) -> None:
            controller.on_event(event["type"], {**event["object"], **known})

        kopf.on.event(kind.group, version, kind.plural, id=kind.plural, registry=handlers)(on_event)
    return handlers


def configure(settings: kopf.OperatorSettings) -> None:
    """kopf's settings where its defaults are unsuitable for long-running watches."""
    settings.posting.enabled = False  # reconcile records Events on transitions
    settings.scanning.disabled = True  # no right to watch namespaces and CRDs is needed
    settings.peering.standalone = True  # leadership is decided by a Lease
    settings.watching.server_timeout = random.randint(290, 600)
    settings.watching.client_timeout = settings.watching.server_timeout + 30
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 100
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.queueing.idle_timeout = 0.1  # until then the objects of the first list stay in memory
    settings.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 34, 60)
    settings.process.ultimate_exiting_timeout = 25
    for kind in kinds.WATCHED:
        if kind.label:
            version = kind.api_version.rpartition("/")[2]
            settings.watching.label_selectors[kind.group, version, kind.plural] = kind.label


def _election(connection: Connection, settings: Settings) -> Election:
    terms = Terms(
        duration=settings.lease_duration_seconds,
        renew_deadline=settings.lease_renew_deadline_seconds,
        retry=settings.lease_retry_seconds,
    )
    api = LeaseClient(
        connection,
        namespace=settings.operator_namespace,
        name=names.LEASE,
        seconds=terms.request,
    )
    return Election(api, identity=settings.pod_name, terms=terms)


async def _is_elected(election: Election, stop: asyncio.Event) -> bool:
    """Wait for the Lease; False when the process is stopped before it is acquired."""
    elected, stopped = asyncio.create_task(election.acquire()), asyncio.create_task(stop.wait())
    await asyncio.wait([elected, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if elected.done():
        elected.result()
        return True
    elected.cancel()
    return False


async def _until_one_ends(tasks: dict[str, asyncio.Task[Any]]) -> str:
    """The name of the first task that ends unexpectedly; the task that restores the signal handlers may
    end.
    """
    waiting = set(tasks)
    while True:
        await asyncio.wait([tasks[name] for name in waiting], return_when=asyncio.FIRST_COMPLETED)
        ended = sorted(name for name in waiting if tasks[name].done())
        for name in ended:
            if name != "signals":
                return name
            waiting.discard(name)


async def _restore_signal_handlers(ready: asyncio.Event, stop: asyncio.Event) -> None:
    """kopf installs its own signal handlers when it starts; with them the Lease would be released late."""
    await ready.wait()
    _stop_on_signals(stop)


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def _die(lease: asyncio.Task[Any]) -> NoReturn:
    """Another replica leads: exit at once, without any cleanup."""
    error = lease.exception()
    if not isinstance(error, LeadershipLostError):
        logger.error("the Lease task ended: %r", error)
    logger.error("leadership lost: %s", error)
    _end(EXIT_LOST)


def _end(code: int) -> NoReturn:
    """Exit at once. kopf holds nothing that has to be saved, and stopping it during a list takes five seconds
    and logs errors from half-closed generators.
    """
    logging.shutdown()
    os._exit(code)
