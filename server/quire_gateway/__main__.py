"""`python -m quire_gateway`: listens, watches the endpoints, relays, and ends when a drain has ended."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: what is imported stays, and walking it takes a tenth of the start

import asyncio
import functools
import logging
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import uvloop
from prometheus_client import disable_created_metrics

from quire_gateway import informer
from quire_gateway.activator import Activator
from quire_gateway.app import Gateway
from quire_gateway.attempt import ReplicaUpstream
from quire_gateway.batch_proxy import BatchProxy
from quire_gateway.classifier import Classifier
from quire_gateway.client_limits import ClientLimiter
from quire_gateway.delegation import Delegations
from quire_gateway.demand_writer import DemandWriter
from quire_gateway.dispatch import Dispatcher
from quire_gateway.external_secrets import ExternalSecrets
from quire_gateway.external_upstream import ExternalUpstream
from quire_gateway.gateway_leases import GatewayLeases
from quire_gateway.hidden_adapters import HiddenAdapters
from quire_gateway.informer import Informer, Kind, Store
from quire_gateway.kube_api import KubeApi
from quire_gateway.limit_script import SCRIPT
from quire_gateway.limit_store_url import LimitStoreError, read_url
from quire_gateway.load_poller import LoadPoller
from quire_gateway.log import AccessLog
from quire_gateway.management import Management
from quire_gateway.metrics import Metrics
from quire_gateway.peers import Outbox, PeerReceiver, Peers, PeerSender
from quire_gateway.public_addresses import CLUSTER_NETWORKS, AddressGuard
from quire_gateway.relay import Relay
from quire_gateway.replicas import LABEL_SERVICE, NewRouter, ReplicaTable
from quire_gateway.request_signing import RequestSigner, SigningKeyError
from quire_gateway.response_cache import ResponseCache
from quire_gateway.routing.strategies import router_for
from quire_gateway.routing_state import RoutingState
from quire_gateway.settings import Settings
from quire_gateway.shadow import ShadowTraffic
from quire_gateway.shared_limits import SharedLimiter
from quire_gateway.status_writer import StatusWriter
from quire_gateway.store_events import StoreEvents
from quire_gateway.tracing import Tracing
from quire_gateway.usage_ledger import UsageLedger
from quire_gateway.usage_writer import UsageWriter
from quire_http import json_log
from quire_http.drain import Drain, DrainLimits
from quire_http.environ import SettingsError
from quire_http.malloc import return_memory
from quire_http.server import HttpServer, listen
from quire_http.signed_token import TrustedKeys

logger = logging.getLogger(__name__)


def main() -> int:
    """The exit code."""
    try:
        settings = Settings.from_environ(os.environ)
        signer = RequestSigner(settings.signing_key) if settings.signing_key else None
        if settings.limit_store_url is not None:
            read_url(settings.limit_store_url)
        listener = listen(settings.host, settings.port)
    except (SettingsError, SigningKeyError, LimitStoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # before there is a log
        return 2
    json_log.configure("gateway", settings.log_level)
    return_memory()
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not annotate it
    gc.freeze()  # what was imported stays: the collector need not walk it
    gc.enable()
    gc.set_threshold(10_000)  # more objects than requests have that run at once: these end by themselves
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
        (informer.LLM_EXTERNAL_BACKENDS, state.externals),
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
    new_router = _new_router(settings, outbox)
    table = ReplicaTable(settings.namespaces, settings.health_port, time.monotonic, new_router)
    metrics = Metrics(table)
    api = KubeApi(settings.kube_api, settings.service_account)
    state = RoutingState()
    informers = _informers(api, settings.namespaces, table, state)
    secrets = ExternalSecrets(settings.external_secrets_dir, settings.external_secrets)
    upstream = ReplicaUpstream(signer)
    dispatcher = Dispatcher(table, state, settings.timeouts, require_keys=settings.require_keys)
    leases = GatewayLeases(state.changed.set, time.monotonic)
    external = ExternalUpstream(AddressGuard(settings.external_networks), secrets, leases.num_live)
    ledger = UsageLedger(state.clients.get, time.time)
    local = ClientLimiter(leases.num_live, ledger, time.monotonic)
    is_in_cluster = bool(settings.pod_namespace and settings.pod_name)
    place = settings.pod_namespace, settings.pod_name
    store_events = StoreEvents(api, place, denies=settings.denies_without_store)
    shared = _shared(settings, local, metrics, store_events)
    activator = Activator(table, state.deployments, metrics, leases.num_live, can_ask=is_in_cluster)
    management = Management(dispatcher, metrics, drain, informers, int(time.time()))
    relay, cache = Relay(upstream, external, metrics, activator), ResponseCache(time.monotonic)
    classifier = Classifier(AddressGuard((*CLUSTER_NETWORKS, *settings.external_networks)), metrics)
    shadow = ShadowTraffic(upstream, metrics, random.Random())
    batch = _batch_proxy(settings, signer)
    tracing = _tracing(settings)
    parts = (dispatcher, relay, management, metrics, AccessLog(_write_line), drain, shared or local, cache)
    gateway = Gateway(*parts, classifier, shadow, tracing, batch)
    age, on_refusal = settings.max_connection_age, metrics.connection_refused
    server = HttpServer(gateway, listener, max_connection_age=age, on_refusal=on_refusal)
    running: list[Coroutine[Any, Any, None]] = [one.run() for one in informers]
    hidden = HiddenAdapters(state, table)
    metrics.registry.register(hidden)
    running += [LoadPoller(table).run(), hidden.run()]
    if settings.peer_service:
        running += _peer_sync(settings, api, table, outbox)
    if shared is not None:
        running.append(shared.run())
    writers: list[_Writer] = []
    if is_in_cluster:
        running.append(Informer(api, informer.LEASES, leases, settings.pod_namespace).run())
        status = StatusWriter(api, place, state, leases, table, metrics.rollouts, secrets.problem)
        writers = [
            DemandWriter(api, settings.pod_namespace, activator),
            UsageWriter(api, state, ledger),
            store_events,
            status,
        ]
    await _run(server, drain, running, writers)
    for each in (shared, shadow, classifier, upstream, external, batch):
        if each is not None:
            await each.close()
    if tracing is not None:
        tracing.close()


async def _run(
    server: HttpServer, drain: Drain, running: Iterable[Coroutine[Any, Any, None]], writers: Sequence[_Writer]
) -> None:
    """Serve until the drain is over, with all that runs beside."""
    serving = await server.start()
    background = [asyncio.create_task(one) for one in running]
    writing = [asyncio.create_task(one.run()) for one in writers]
    await _run_until_drained(drain, server, serving, [*background, *writing])
    await _end(writing)
    for writer in writers:
        await writer.close()  # while the informers run: they bring what other gateways write
    await _end(background)


class _Writer(Protocol):
    """Writes objects of the API server until it is cancelled, and once more in `close`."""

    async def run(self) -> None:
        """Until cancelled."""

    async def close(self) -> None:
        """This gateway ends."""


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _batch_proxy(settings: Settings, signer: RequestSigner | None) -> BatchProxy | None:
    """The way to quire-batch, where there is one."""
    if not settings.batch_url or signer is None or settings.public_keys is None:
        return None
    trusted = TrustedKeys(settings.public_keys, time.monotonic)
    return BatchProxy(settings.batch_url, signer, Delegations(signer, trusted))


def _tracing(settings: Settings) -> Tracing | None:
    """Exports spans, where there is a collector."""
    if not settings.otlp_endpoint:
        return None
    from quire_http import otlp  # noqa: PLC0415  # a tenth of the start, for few

    resource = {"service.name": "quire-gateway"}
    provider = otlp.provider_over_otlp(settings.otlp_endpoint, settings.trace_sample_ratio, resource)
    return Tracing(provider.get_tracer("quire_gateway"), functools.partial(otlp.close, provider))


def _shared(
    settings: Settings, local: ClientLimiter, metrics: Metrics, events: StoreEvents
) -> SharedLimiter | None:
    """The limits of all gateways together, where there is a store for them."""
    if settings.limit_store_url is None:
        return None
    from quire_gateway.limit_store import LimitStore  # noqa: PLC0415  # a fifth of the start, for few

    store = LimitStore(settings.limit_store_url, SCRIPT, settings.limit_store_seconds)
    name = settings.pod_name or socket.gethostname()
    denies = settings.denies_without_store
    return SharedLimiter(local, store, metrics, name, denies=denies, changed=events.changed)


def _new_router(settings: Settings, outbox: Outbox) -> NewRouter:
    return functools.partial(
        router_for,
        chance=random.Random(),
        seed=int.from_bytes(settings.seed[:8], "little"),
        publish=outbox.publish if settings.peer_service else None,
    )


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
