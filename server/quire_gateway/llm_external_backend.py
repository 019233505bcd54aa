"""An LLMExternalBackend as the gateway reads it: an OpenAI-compatible endpoint outside the cluster.

Where requests may be sent is decided here and by the API server's rules alone: a URL without user, query and
fragment, over TLS unless the object says otherwise. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import InvalidOperation
from typing import Any
from urllib.parse import urlsplit

from quire_gateway.llm_route import ObjectError, Prices, prices

_URL = re.compile(
    r"https?://[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]{1,5})?(/[-A-Za-z0-9._~/]*)?", re.ASCII
)
_SECRET = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_KEY = re.compile(r"[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}", re.ASCII)
DEFAULT_KEY = "api-key"


@dataclass(frozen=True, slots=True)
class SecretRef:
    """A key of a Secret that is mounted in the gateway's pods."""

    name: str
    key: str = DEFAULT_KEY


@dataclass(frozen=True, slots=True)
class LLMExternalBackend:
    """One backend."""

    namespace: str
    name: str
    uid: str
    base_url: str  # without a slash at its end
    model: str  # the name to ask for there
    api_key: SecretRef | None = None
    ca_bundle: str = ""  # in PEM; empty: the authorities of the gateway's image
    allow_plain_http: bool = False
    prices: Prices = Prices()
    requests_per_minute: int | None = None  # at all gateways together

    @property
    def place(self) -> tuple[str, str]:
        """Its namespace and its name."""
        return self.namespace, self.name

    @property
    def host(self) -> str:
        """The name or the address of its server, in lower case."""
        return urlsplit(self.base_url).hostname or ""


def parse(body: Mapping[str, Any]) -> LLMExternalBackend:
    """The backend of an object. Raises ObjectError."""
    try:
        metadata, spec = body["metadata"], body["spec"]
        limit = spec.get("requestsPerMinute")
        backend = LLMExternalBackend(
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            base_url=str(spec["baseURL"]).rstrip("/"),
            model=str(spec["model"]),
            api_key=_secret(spec["apiKeySecretRef"]) if spec.get("apiKeySecretRef") else None,
            ca_bundle=str(spec.get("caBundle") or ""),
            allow_plain_http=spec.get("allowPlainHTTP", False) is True,
            prices=prices(spec.get("prices") or {}),
            requests_per_minute=None if limit is None else int(limit),
        )
    except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation) as error:
        raise ObjectError(f"the spec cannot be read: {error!r}") from None
    _check(backend)
    return backend


def _secret(body: Mapping[str, Any]) -> SecretRef:
    found = SecretRef(str(body["name"]), str(body.get("key", DEFAULT_KEY)))
    if _SECRET.fullmatch(found.name) is None or _KEY.fullmatch(found.key) is None:
        raise ValueError(f"apiKeySecretRef is {found.name!r}, {found.key!r}")
    return found


def _check(backend: LLMExternalBackend) -> None:
    """What the API server's rules ask for, because the CRD may be another one."""
    if _URL.fullmatch(backend.base_url) is None:
        raise ObjectError("spec.baseURL must be https://HOST[:PORT][/PATH], and have no more than that")
    if not _has_possible_port(backend.base_url):
        raise ObjectError("spec.baseURL must have a port from 1 to 65535, or none")
    if backend.base_url.startswith("http:") and (backend.api_key or not backend.allow_plain_http):
        raise ObjectError("spec.baseURL must begin with https://, or say allowPlainHTTP and send no key")


def _has_possible_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False
