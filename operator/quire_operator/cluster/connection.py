"""Requests to the API server as plain dicts: credentials, timeouts, content types, errors.

The Kubernetes client is used for kubeconfig and in-cluster credentials only, not its models and serializer.
The token file is read for every request, because the kubelet replaces it before the token expires.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from quire_operator.cluster.errors import ClusterError, UnreachableError, from_answer

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"

_TO_ESCAPE = re.compile("[^\x00-\x7e\U00010000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Address and credentials of the API server, for clients with their own connections."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


class Connection:
    """A connection pool with one identity."""

    def __init__(self, configuration: Configuration, token_file: Path | None = None) -> None:
        self._configuration = configuration
        self._token_file = token_file
        connector = aiohttp.TCPConnector(ssl=_tls(configuration), limit=64)
        self._session = aiohttp.ClientSession(
            connector=connector, trust_env=False, headers={"User-Agent": "quire-operator", "Accept": JSON}
        )

    @classmethod
    async def open(cls) -> Connection:
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
            raise ClusterError(f"no credentials for the API server: {error}") from error
        return cls(configuration, token_file)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def access(self) -> Access:
        """The credentials as they are now."""
        return Access(
            server=str(self._configuration.host),
            ca_path=self._configuration.ssl_ca_cert,
            insecure=not self._configuration.verify_ssl,
            token=await self._token() or None,
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
        headers = {"Content-Type": content_type}
        token = await self._token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        data = None if body is None else encode(body)
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
        document = _document(raw)
        if not 200 <= answer.status <= 299:
            raise from_answer(answer.status, str(document.get("message") or answer.reason or ""))
        return document

    async def _token(self) -> str:
        if self._token_file is not None:
            return self._token_file.read_text(encoding="utf-8").strip()
        header = await self._configuration.get_api_key_with_prefix("BearerToken") or ""
        return header.rpartition(" ")[2].strip()


def encode(body: Any) -> bytes:
    """JSON that is valid YAML too, because the API server parses apply requests as YAML.

    YAML has no surrogate pairs, so characters that JSON would escape as one are not escaped; control
    characters are.
    """
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return _TO_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _document(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
