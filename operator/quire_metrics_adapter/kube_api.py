"""Requests to the API server and watches, as plain dicts. The only module here that uses the Kubernetes
client, for kubeconfig files.

An object that is nested deeper than Python can decode is read without its depths and reported, as in the
operator: any tenant may create one. The token file is read for every request, because the kubelet replaces
it.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from quire_metrics_adapter.errors import (
    ApiError,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnreachableError,
)
from quire_operator import json_decoder
from quire_operator.json_decoder import Report

Document = dict[str, Any]

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 10.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

# A watch ends after this time and is resumed, so that a dead connection is noticed.
WATCH_SECONDS = 60
_LINE_BYTES = 2 << 20  # etcd stores no larger object
_ERRORS = {400: InvalidError, 404: NotFoundError, 409: ConflictError, 410: GoneError}


class Connection:
    """A connection pool with one identity. `report` gets each object that could not be read in full."""

    def __init__(
        self,
        configuration: Configuration,
        token_file: Path | None = None,
        report: Report = lambda body, why: None,
    ) -> None:
        self._report = report
        self._configuration = configuration
        self._token_file = token_file
        tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            tls.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=64),
            trust_env=False,
            read_bufsize=_LINE_BYTES,
            headers={"User-Agent": "quire-metrics-adapter"},
        )

    @classmethod
    async def open(cls, report: Report) -> Connection:
        """Connect with KUBECONFIG where it is set, else with the pod's ServiceAccount."""
        configuration, token_file = Configuration(), None
        try:
            if os.environ.get("KUBECONFIG"):
                await kubernetes_config.load_kube_config(client_configuration=configuration)
            else:
                token_file = SERVICE_ACCOUNT / "token"
                authority = str(SERVICE_ACCOUNT / "ca.crt")
                loader = InClusterConfigLoader(token_file, authority, try_refresh_token=False)
                loader.load_and_set(configuration)
        except kubernetes_config.ConfigException as error:
            raise ApiError(f"no credentials for the API server: {error}") from error
        return cls(configuration, token_file, report)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Document:
        """The response's JSON object; an ApiError for anything but a 2xx response."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
        headers = {"Content-Type": content_type, "Accept": accept, **await self._authorization()}
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._session.request(
                method,
                f"{self._configuration.host}{path}",
                params=query,
                data=data,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {type(error).__name__} {error}") from error
        document = self._document(raw)
        if not 200 <= answer.status <= 299:
            raise _error(answer.status, f"{method} {path}: {document.get('message') or answer.reason}")
        return document

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Document]:
        """The events of one watch, which ends by itself; GoneError when the resource version is too old."""
        timeout = aiohttp.ClientTimeout(
            total=WATCH_SECONDS + 2 * CONNECT_SECONDS, sock_connect=CONNECT_SECONDS
        )
        parameters = {**query, "watch": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        try:
            async with self._session.get(
                f"{self._configuration.host}{path}",
                params={**parameters, "allowWatchBookmarks": "true"},
                headers=await self._authorization(),
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    document = self._document(await answer.read())
                    raise _error(answer.status, f"watch {path}: {document.get('message') or answer.reason}")
                async for line in answer.content:
                    event = self._document(line)
                    if not isinstance(event.get("object"), dict):
                        raise UnreachableError(f"watch {path}: it broke in the middle of an event")
                    if event.get("type") == "ERROR":
                        status = event["object"]
                        raise _error(int(status.get("code") or 500), f"watch {path}: {status.get('message')}")
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UnreachableError(f"watch {path}: {type(error).__name__} {error}") from error

    def _document(self, raw: bytes) -> Document:
        try:
            document = json_decoder.loads(raw, self._report)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    async def _authorization(self) -> dict[str, str]:
        if self._token_file is not None:
            token = self._token_file.read_text(encoding="utf-8").strip()
        else:
            header = await self._configuration.get_api_key_with_prefix("BearerToken") or ""
            token = header.rpartition(" ")[2].strip()
        return {"Authorization": f"Bearer {token}"} if token else {}


def _error(status: int, message: str) -> ApiError:
    if status == 429 or status >= 500:
        return UnreachableError(f"HTTP {status}: {message}")
    return _ERRORS.get(status, ApiError)(f"HTTP {status}: {message}")
