"""`python -m quire_gateway`: listens, watches the endpoints, relays, and ends when a drain has ended."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

import uvloop
from prometheus_client import disable_created_metrics

from quire_gateway import informer, log
from quire_gateway.activator import Activator
from quire_gateway.app import Gateway
from quire_gateway.attempt import Upstream
from quire_gateway.client_limits import ClientLimiter
from quire_gateway.demand_writer import DemandWriter
from quire_gateway.dispatch import Dispatcher
from quire_gateway.gateway_leases import GatewayLeases
from quire_gateway.informer import Informer, Kind, Store
from quire_gateway.kube_api import KubeApi
from quire_gateway.load_poller import LoadPoller
from quire_gateway.log import AccessLog
from quire_gateway.management import Management
from quire_gateway.metrics import Metrics
from quire_gateway.peers import Outbox, PeerReceiver, Peers, PeerSender
from quire_gateway.relay import Relay
from quire_gateway.replicas import LABEL_SERVICE, ReplicaTable
from quire_gateway.request_signing import RequestSigner, SigningKeyError
from quire_gateway.response_cache import ResponseCache
from quire_gateway.routing.strategies import router_for
from quire_gateway.routing_state import RoutingState
from quire_gateway.settings import Settings, SettingsError
from quire_gateway.status_writer import StatusWriter
from quire_gateway.usage_ledger import UsageLedger
from quire_gateway.usage_writer import UsageWriter
from quire_http.drain import Drain, DrainLimits
from quire_http.malloc import return_memory
from quire_http.server import HttpServer, listen

logger = logging.getLogger(__name__)


def main() -> int:
    """The exit code."""
    try:
        settings = Settings.from_environ(os.environ)
        signer = RequestSigner(settings.signing_key) if settings.signing_key else None
        listener = listen(settings.host, settings.port)
    except (SettingsError, SigningKeyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # before there is a log
        return 2
    log.configure(settings.log_level)
    return_memory()
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not annotate it
    gc.freeze()  # what was imported stays: the collector need not walk it
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener, signer))
    return 0


def _informers(
    api: KubeApi, namespaces: Iterable[str], table: ReplicaTable, state: RoutingState
) -> list[Informer]:
    watched: list[tuple[Kind, Store]] = [
        (informer.ENDPOINT_SLICES, table),
        (informer.LLM_ROUTES, state.routes),
        (informer.LLM_CLIENTS, state.clients),
        (informer.LLM_DEPLOYMENTS, state.deployments),
    ]
    return [Informer(api, kind, store, namespace) for namespace in namespaces for kind, store in watched]


def _write_line(line: bytes) -> None:
    os.write(sys.stderr.fileno(), line)


async def _serve(settings: Settings, listener: socket.socket, signer: RequestSigner | None) -> None:
    loop = asyncio.get_running_loop()
    drain = Drain(DrainLimits(settings.drain_seconds, settings.pre_stop_seconds), time.monotonic)
    loop.add_signal_handler(signal.SIGTERM, drain.begin)
    outbox = Outbox()
    new_router = functools.partial(
        router_for,
        chance=random.Random(),
        seed=int.from_bytes(settings.seed[:8], "little"),
        publish=outbox.publish if settings.peer_service else None,
    )
    table = ReplicaTable(settings.namespaces, settings.health_port, time.monotonic, new_router)
    metrics = Metrics(table)
    api = KubeApi(settings.kube_api, settings.service_account)
    state = RoutingState()
    informers = _informers(api, settings.namespaces, table, state)
    upstream = Upstream(signer)
    dispatcher = Dispatcher(table, state, settings.timeouts, require_keys=settings.require_keys)
    leases = GatewayLeases(state.changed.set, time.monotonic)
    ledger = UsageLedger(state.clients.get, time.time)
    limiter = ClientLimiter(leases.num_live, ledger, time.monotonic)
    is_in_cluster = bool(settings.pod_namespace and settings.pod_name)
    activator = Activator(table, state.deployments, metrics, leases.num_live, can_ask=is_in_cluster)
    management = Management(dispatcher, metrics, drain, informers, int(time.time()))
    relay, cache = Relay(upstream, metrics, activator), ResponseCache(time.monotonic)
    log_of_access = AccessLog(_write_line)
    gateway = Gateway(dispatcher, relay, management, metrics, log_of_access, drain, limiter, cache)
    age, on_refusal = settings.max_connection_age, metrics.connection_refused
    server = HttpServer(gateway, listener, max_connection_age=age, on_refusal=on_refusal)
    serving = await server.start()
    background = [loop.create_task(one.run()) for one in informers]
    background.append(loop.create_task(LoadPoller(table).run()))
    if settings.peer_service:
        background += [loop.create_task(one) for one in _peer_sync(settings, api, table, outbox)]
    writer, usage, demands = None, None, None
    writers: list[asyncio.Task[None]] = []
    if is_in_cluster:
        watch = Informer(api, informer.LEASES, leases, settings.pod_namespace)
        place = settings.pod_namespace, settings.pod_name
        writer = StatusWriter(api, place, state, leases, table, metrics.rollouts)
        usage = UsageWriter(api, state, ledger)
        demands = DemandWriter(api, settings.pod_namespace, activator)
        writers = [loop.create_task(one.run()) for one in (writer, usage, demands)]
        background.append(loop.create_task(watch.run()))
    await _run_until_drained(drain, server, serving, [*background, *writers])
    for task in writers:
        task.cancel()
    if writer is not None and usage is not None and demands is not None:
        await demands.close()
        await usage.close()  # while the informers run: they bring what other gateways write
        await writer.close()
    for task in background:
        task.cancel()
    await upstream.close()


async def _run_until_drained(
    drain: Drain, server: HttpServer, serving: asyncio.Task[None], background: list[asyncio.Task[None]]
) -> None:
    """Returns once no request runs any more. Raises what ended one of the tasks before its time."""
    begin = asyncio.create_task(drain.wait_for_begin())
    await asyncio.wait({serving, begin, *background}, return_when=asyncio.FIRST_COMPLETED)
    if not begin.done():
        for ended in (task for task in (serving, *background) if task.done()):
            ended.result()  # raises what ended it
        raise RuntimeError("the HTTP server ended by itself")
    logger.info("draining")
    await drain.wait_for_end(server.connections)
    server.stop()
    await serving


def _peer_sync(
    settings: Settings, api: KubeApi, table: ReplicaTable, outbox: Outbox
) -> Iterator[Coroutine[Any, Any, None]]:
    """What runs to share choices with the other gateways."""
    peers = Peers(settings.pod_name)
    kind = replace(informer.ENDPOINT_SLICES, selector=f"{LABEL_SERVICE}={settings.peer_service}")
    yield Informer(api, kind, peers, settings.pod_namespace).run()
    yield PeerSender(peers, outbox, settings.seed).run()
    yield _serve_peers(PeerReceiver(table, settings.seed), settings)


async def _serve_peers(receiver: PeerReceiver, settings: Settings) -> None:
    """Until cancelled."""
    server = HttpServer(
        receiver,
        listen(settings.host, settings.peer_port),
        max_connection_age=math.inf,
        on_refusal=lambda: None,
    )
    await (await server.start())


if __name__ == "__main__":
    sys.exit(main())
