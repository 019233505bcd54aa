"""What quire-batch reads from its environment, which the Helm chart writes. Secrets are in files."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire_batch.webhook import Origin, WebhookError, origin
from quire_http.environ import EnvironReader, SettingsError

_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """What one client may have, and how long."""

    file_bytes: int = 200 << 20
    client_bytes: int = 2 << 30  # of all its files
    lines: int = 50_000  # of a batch
    batches: int = 20  # that are not over
    jobs: int = 1_000  # that are not over
    retention_seconds: float = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where it listens, what it asks, where its state is."""

    gateway_url: str
    keys_directory: Path  # of the gateway's public keys
    directory: Path  # of the database and of files, where they are not elsewhere
    database_url: str = field(default="", repr=False)  # of PostgreSQL; empty: SQLite in the directory
    bucket: str = ""  # s3://BUCKET/PREFIX; empty: files are in the directory
    bucket_endpoint: str = ""
    worker: str  # the pod's name: a pod that comes back with it frees what it had taken
    host: str = "0.0.0.0"
    port: int = 8080
    concurrency: int = 64  # lines in flight of this worker, at most
    window_seconds: float = 86_400.0
    lease_seconds: float = 60.0
    drain_seconds: float = 30.0
    quotas: Quotas = Quotas()
    webhooks: frozenset[Origin] = frozenset()  # to which ends of jobs may be reported
    webhook_secret: bytes = field(default=b"", repr=False)
    log_level: str = "info"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the environment, and the files that it names. Raises SettingsError."""
        read = EnvironReader(environ)
        level = read.text("LOG_LEVEL", cls.log_level)
        if level not in _LOG_LEVELS:
            raise SettingsError(f"QUIRE_LOG_LEVEL={level!r}: use one of {', '.join(_LOG_LEVELS)}")
        webhooks = _origins(read.text("BATCH_WEBHOOKS", ""))
        secret = _secret(read.text("BATCH_WEBHOOK_SECRET_FILE", ""))
        if webhooks and not secret:
            raise SettingsError(
                "QUIRE_BATCH_WEBHOOKS needs QUIRE_BATCH_WEBHOOK_SECRET_FILE, to sign them with"
            )
        return cls(
            gateway_url=_required(read, "BATCH_GATEWAY_URL").rstrip("/"),
            keys_directory=Path(_required(read, "BATCH_GATEWAY_KEYS_DIR")),
            directory=Path(_required(read, "BATCH_DIR")),
            database_url=_content(read.text("BATCH_DATABASE_URL_FILE", "")),
            bucket=read.text("BATCH_BUCKET", ""),
            bucket_endpoint=read.text("BATCH_BUCKET_ENDPOINT", ""),
            worker=read.text("BATCH_WORKER", environ.get("HOSTNAME", "")) or "quire-batch",
            host=read.text("BATCH_HOST", cls.host),
            port=int(read.number("BATCH_PORT", cls.port, 65_535)),
            concurrency=max(int(read.number("BATCH_CONCURRENCY", cls.concurrency, 4096)), 1),
            window_seconds=read.number("BATCH_WINDOW_SECONDS", cls.window_seconds, 86_400.0),
            lease_seconds=max(read.number("BATCH_LEASE_SECONDS", cls.lease_seconds), 1.0),
            drain_seconds=read.number("BATCH_DRAIN_SECONDS", cls.drain_seconds),
            quotas=_quotas(read),
            webhooks=webhooks,
            webhook_secret=secret,
            log_level=level,
        )


def _quotas(read: EnvironReader) -> Quotas:
    return Quotas(
        file_bytes=int(read.number("BATCH_FILE_BYTES", Quotas.file_bytes)),
        client_bytes=int(read.number("BATCH_CLIENT_BYTES", Quotas.client_bytes)),
        lines=int(read.number("BATCH_LINES", Quotas.lines)),
        batches=int(read.number("BATCH_OPEN_BATCHES", Quotas.batches)),
        jobs=int(read.number("BATCH_OPEN_JOBS", Quotas.jobs)),
        retention_seconds=read.number("BATCH_RETENTION_SECONDS", Quotas.retention_seconds),
    )


def _required(read: EnvironReader, name: str) -> str:
    if value := read.text(name, ""):
        return value
    raise SettingsError(f"QUIRE_{name} is not set")


def _content(path: str) -> str:
    """What a file of a Secret has, empty where none is named."""
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


def _origins(text: str) -> frozenset[Origin]:
    try:
        return frozenset(origin(one.strip()) for one in text.split(",") if one.strip())
    except WebhookError as error:
        raise SettingsError(f"QUIRE_BATCH_WEBHOOKS: {error}") from None


def _secret(path: str) -> bytes:
    """As Standard Webhooks writes it: whsec_ and base64."""
    text = _content(path)
    try:
        secret = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        raise SettingsError(f"{path}: must be whsec_ and the base64 of 24 to 64 random bytes") from None
    if path and not 24 <= len(secret) <= 64:
        raise SettingsError(f"{path}: must be whsec_ and the base64 of 24 to 64 random bytes")
    return secret
