"""Authentication and authorization data: the front proxy's headers, TokenReviews and SubjectAccessReviews.

Pure. The front proxy is trusted only on a connection whose client certificate was issued by its authority and
has an allowed name; the headers alone prove nothing. Source:
https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer/
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from quire_metrics_adapter.discovery import GROUP, RESOURCE
from quire_metrics_adapter.queries import Query

Document = dict[str, Any]

# Written by the API server, readable with the role extension-apiserver-authentication-reader.
CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"


@dataclass(frozen=True)
class FrontProxy:
    """How the API server identifies itself: its authority (PEM), its names (none: any), its headers."""

    authority: str
    allowed_names: tuple[str, ...]
    user_headers: tuple[str, ...]
    uid_headers: tuple[str, ...]
    group_headers: tuple[str, ...]
    extra_prefixes: tuple[str, ...]

    def allows(self, common_name: str) -> bool:
        """Whether the holder of a certificate from `authority` may act for other users."""
        return not self.allowed_names or common_name in self.allowed_names


@dataclass(frozen=True)
class Caller:
    """A user, as the API server knows it."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())


def front_proxy(config_map: Mapping[str, Any]) -> FrontProxy | None:
    """Parses the ConfigMap; None where the API server has no front proxy."""
    data = config_map.get("data") or {}
    authority = str(data.get("requestheader-client-ca-file") or "")
    if not authority.strip():
        return None
    return FrontProxy(
        authority=authority,
        allowed_names=_strings(data, "allowed-names"),
        user_headers=_strings(data, "username-headers"),
        uid_headers=_strings(data, "uid-headers"),
        group_headers=_strings(data, "group-headers"),
        extra_prefixes=_strings(data, "extra-headers-prefix"),
    )


def proxied_caller(headers: Iterable[tuple[str, str]], proxy: FrontProxy) -> Caller | None:
    """The user for whom the front proxy sends the request; None where it names none."""
    given = [(name.lower(), value) for name, value in headers]
    users, uids = _valued(given, proxy.user_headers), _valued(given, proxy.uid_headers)
    if not users:
        return None
    extra: dict[str, list[str]] = {}
    for prefix in (prefix.lower() for prefix in proxy.extra_prefixes):
        for name, value in given:
            if name.startswith(prefix) and len(name) > len(prefix):
                extra.setdefault(unquote(name[len(prefix) :]), []).append(value)
    return Caller(users[0], (uids or [""])[0], tuple(_valued(given, proxy.group_headers)), _frozen(extra))


def token_review(token: str) -> Document:
    """A TokenReview of a bearer token."""
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }


def reviewed_caller(review: Mapping[str, Any]) -> Caller | None:
    """The user of the token, None for a token that the API server does not accept."""
    status = review.get("status") or {}
    user = status.get("user") or {}
    if status.get("authenticated") is not True or not user.get("username"):
        return None
    groups = tuple(str(group) for group in user.get("groups") or ())
    return Caller(str(user["username"]), str(user.get("uid") or ""), groups, _frozen(user.get("extra") or {}))


def access_review(caller: Caller, query: Query) -> Document:
    """A SubjectAccessReview: whether `caller` may get `query`, with the path read as the API server reads
    it.
    """
    attributes = {
        "group": GROUP,
        "version": query.version,
        "resource": RESOURCE,
        "subresource": query.metric,
        "namespace": query.namespace,
        "name": query.name,
        "verb": "get",
    }
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": caller.user,
            "uid": caller.uid,
            "groups": list(caller.groups),
            "extra": {key: list(values) for key, values in caller.extra},
            "resourceAttributes": attributes,
        },
    }


def is_allowed(review: Mapping[str, Any]) -> bool:
    """The API server's decision; anything but an explicit yes is a no."""
    status = review.get("status") or {}
    return status.get("allowed") is True and status.get("denied") is not True


def _strings(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A JSON list of strings; ValueError for anything else, because nothing may be guessed here."""
    values = json.loads(data.get(f"requestheader-{name}") or "[]")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"requestheader-{name} is no list of strings")
    return tuple(values)


def _valued(given: list[tuple[str, str]], names: Iterable[str]) -> list[str]:
    return [value for name in names for header, value in given if header == name.lower() and value]


def _frozen(extra: Mapping[str, Iterable[str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(sorted((str(key), tuple(str(value) for value in extra[key])) for key in extra))
