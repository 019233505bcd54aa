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
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from quire_operator import json_decoder
from quire_operator.cluster.errors import ClusterError, UnreachableError, from_answer
from quire_operator.cluster.watch_response import response_class
from quire_operator.json_decoder import Report

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"

_TO_ESCAPE = re.compile("[^\x00-\x7e\U00010000-\U0010ffff]")


class Connection:
    """A connection pool with one identity. `report` gets each object that could not be read in full."""

    def __init__(
        self, configuration: Configuration, token_file: Path | None = None, *, report: Report
    ) -> None:
        self._configuration = configuration
        self._token_file = token_file
        self.report = report
        connector = aiohttp.TCPConnector(ssl=_tls(configuration), limit=64)
        self._session = aiohttp.ClientSession(
            connector=connector, trust_env=False, headers={"User-Agent": "quire-operator"}
        )

    @classmethod
    async def open(cls, *, report: Report) -> Connection:
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
        return cls(configuration, token_file, report=report)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @property
    def server(self) -> str:
        """The address of the API server."""
        return str(self._configuration.host)

    async def watch_session(self) -> aiohttp.ClientSession:
        """A session of its own for lists and watches, with the credentials as they are now."""
        token = await self._token()
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_tls(self._configuration), limit=0),
            response_class=response_class(self.report),
            headers={
                "User-Agent": "quire-operator",
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            trust_env=False,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
        seconds: float = REQUEST_SECONDS,
    ) -> dict[str, Any]:
        """The answer's JSON object; a ClusterError for anything but a 2xx answer."""
        headers = {"Content-Type": content_type, "Accept": accept}
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
        document = self._document(raw)
        if not 200 <= answer.status <= 299:
            raise from_answer(answer.status, str(document.get("message") or answer.reason or ""))
        return document

    def _document(self, raw: bytes) -> dict[str, Any]:
        try:
            document = json_decoder.loads(raw, self.report)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

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
