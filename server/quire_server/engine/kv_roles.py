"""The connector of a server's ``--kv-role``, made from its settings and the loaded model."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from quire_server.config import ServeConfig
from quire_server.core.scheduler import Scheduler
from quire_server.core.transfer import ID_BYTES
from quire_server.engine.kv_connector import KVConnector
from quire_server.engine.kv_consumer import KVConsumer
from quire_server.engine.kv_producer import KVProducer
from quire_server.errors import ConfigError
from quire_server.fault_injection import Faults
from quire_server.kv_transfer import nixl
from quire_server.kv_transfer.client import Producers
from quire_server.kv_transfer.holds import SharedHolds
from quire_server.kv_transfer.server import PrefillJob, TransferServer
from quire_server.runner import fingerprint
from quire_server.runner.model_runner import ModelRunner


def connector(config: ServeConfig, scheduler: Scheduler, runner: ModelRunner, faults: Faults) -> KVConnector:
    """For a server without a role, one that does nothing."""
    if config.kv_role == "none":
        return KVConnector()
    blocks = runner.kv_blocks
    assert blocks is not None, "the model was loaded without a role"
    layout = fingerprint.kv_layout(config.model, runner.kv_layout())
    if config.kv_role == "kv_consumer":
        agent = nixl.Agent(secrets.token_bytes(ID_BYTES)) if config.kv_transport == "nixl" else None
        producers = Producers(config.kv_producers, config.peer_key_dir, layout, config.kv_transport, agent)
        return KVConsumer(scheduler, producers, blocks, config.local_prefill_below_tokens)
    holds = SharedHolds(config.kv_lease_seconds)
    agent = nixl.Agent(holds.incarnation, blocks) if config.kv_transport == "nixl" else None

    def listen(submit: Callable[[PrefillJob], None], wake: Callable[[], None]) -> TransferServer:
        try:
            return TransferServer(
                (config.host, config.kv_transfer_port),
                keys_dir=config.peer_key_dir,
                layout=layout,
                blocks=blocks,
                holds=holds,
                submit=submit,
                wake=wake,
                faults=faults,
                agent=agent,
            )
        except OSError as error:
            raise ConfigError(
                f"--kv-transfer-port {config.kv_transfer_port} cannot be listened on: {error.strerror}. "
                "Choose one that is free."
            ) from error

    return KVProducer(scheduler, holds, runner.model_config.vocab_size, listen)
