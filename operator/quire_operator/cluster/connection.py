"""Requests to the API server as plain dicts: credentials, timeouts, content types, errors.

Used by the rest of this package only. The Kubernetes client brings kubeconfig, in-cluster credentials (the
token's file is read again every minute, as it is rotated hourly) and TLS; its typed models are not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from quire_operator.cluster.errors import ClusterError, UnreachableError, from_answer

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach the API server, for those that open their own connections."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


class Connection:
    """One pool of connections with one identity."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._client = ApiClient(configuration)

    @classmethod
    async def open(cls) -> Connection:
        """With KUBECONFIG where it is set, else with the pod's ServiceAccount."""
        configuration = Configuration(client_session_kwargs={"trust_env": False})
        try:
            if os.environ.get("KUBECONFIG"):
                await kubernetes_config.load_kube_config(client_configuration=configuration)
            else:
                kubernetes_config.load_incluster_config(client_configuration=configuration)
        except kubernetes_config.ConfigException as error:
            raise ClusterError(f"no credentials for the API server: {error}") from error
        return cls(configuration)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def access(self) -> Access:
        """The credentials as they are now."""
        header = await self._configuration.get_api_key_with_prefix("BearerToken") or ""
        return Access(
            server=str(self._configuration.host),
            ca_path=self._configuration.ssl_ca_cert,
            insecure=not self._configuration.verify_ssl,
            token=header.rpartition(" ")[2].strip() or None,
            certificate_path=self._configuration.cert_file,
            private_key_path=self._configuration.key_file,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        seconds: float = REQUEST_SECONDS,
    ) -> dict[str, Any]:
        """The answer's JSON object; a ClusterError for anything but a 2xx answer."""
        serialized = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            answer = await self._client.call_api(*serialized, _request_timeout=timeout)
            raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {type(error).__name__} {error}") from error
        document = _document(raw)
        if not 200 <= answer.status <= 299:
            raise from_answer(answer.status, str(document.get("message") or answer.reason or ""))
        return document


def _document(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
