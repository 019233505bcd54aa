"""API keys: a directory in which each file is a client (its name) and a key (its first line), as the kubelet
mounts a Secret. Entries that are added, changed or removed count within seconds.

Further lines of an entry say what its key may do: who gives out keys decides that in the same place. An
entry that is not understood is no key, so that a typing error takes rights away and never grants any.

Decided on `scope["path"]`, never on a URL put together from headers. With a directory, everything is denied
but the public paths; a directory without a key denies every request. Admin paths need an admin's key always.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import Scope

from quire_http import credentials
from quire_http.errors import ApiError
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/health", "/metrics"})
ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
PRINCIPAL = "quire.principal"  # in the scope of a request, once its key was checked
_REREAD_SECONDS = 2.0
_MAX_ENTRY_BYTES = 4096
_GROUP = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_LEVEL = re.compile(r"-?[0-9]{1,3}")
_SETTINGS = "'group: NAME', 'highest-priority: LEVEL' and 'admin: true'"


@dataclass(frozen=True)
class Principal:
    """Whose key a request carries, or for whom a gateway has signed it, and what it may do.

    By default that of a server without keys: all clients are one, which may use any priority; none is an
    admin.
    """

    client: str = ""
    cache_scope: str = ""
    highest_priority: int = MIN_PRIORITY
    is_admin: bool = False
    model: str = ""  # a name beside those that are served, by which this request may ask

    def cache_salt(self, asked: str) -> str:
        """The salt of a request's KV blocks: only requests of one scope with the same salt share them.

        Unambiguous, since a scope has no NUL. Every client's salt has one, so that none is a health check's.
        """
        return f"{self.cache_scope}\0{asked}"

    def priority(self, asked: int) -> int:
        """The priority of a request. Raises a 403 where it is more urgent than the key's highest.

        Normal, which is also the priority of a request that names none, is the key's highest where that is
        lower.
        """
        if asked < min(self.highest_priority, CLASSES["normal"]):
            raise ApiError(
                403,
                f"priority: {asked} is more urgent than {self.highest_priority}, the highest of this key; "
                f"send {self.highest_priority} or more, or have highest-priority of the key's entry changed",
                param="priority",
                code="priority_not_allowed",
            )
        return max(asked, self.highest_priority)


class Keys:
    """The keys, and whose they are."""

    def __init__(self, directory: Path | None, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._principals: dict[bytes, Principal] = {}  # by the digest of the key
        self._problems: dict[str, str] = {}  # entries that are no keys, and why
        self._read_at = float("-inf")

    @property
    def required(self) -> bool:
        """False where this server has no keys: every request is allowed."""
        return self._directory is not None

    def principal_of(self, key: bytes) -> Principal | None:
        """Whose key this is, or None."""
        self._reread()
        presented = _digest(key)
        found: Principal | None = None
        for digest, principal in self._principals.items():  # all of them, in constant time
            if hmac.compare_digest(digest, presented):
                found = principal
        return found

    def _reread(self) -> None:
        now = self._clock()
        if self._directory is None or now - self._read_at < _REREAD_SECONDS:
            return
        self._read_at = now
        try:
            # The kubelet keeps the real files in hidden directories and links to them.
            paths = [path for path in sorted(self._directory.iterdir()) if not path.name.startswith(".")]
            contents = [(path.name, path.read_bytes().strip()) for path in paths if path.is_file()]
        except OSError:
            # In the middle of the kubelet's swap: what was read before holds until the next look.
            logger.warning("cannot read the API keys", exc_info=True)
            return
        self._principals, problems = _read_entries(contents)
        for client, why in problems.items() - self._problems.items():
            logger.error("this entry of the API keys is no key", extra={"client": client, "why": why})
        self._problems = problems


def _read_entries(contents: Iterable[tuple[str, bytes]]) -> tuple[dict[bytes, Principal], dict[str, str]]:
    """Principals by the digests of their keys; and why other entries are no keys, without a word of them."""
    principals: dict[bytes, Principal] = {}
    problems: dict[str, str] = {}
    for client, content in contents:
        if not content:
            continue
        try:
            digest, principal = _read_entry(client, content)
        except ValueError as error:
            problems[client] = str(error)
            continue
        if (other := principals.get(digest)) is not None:
            problems[client] = f"it has the same key as {other.client}: give each client a key of its own"
            continue
        principals[digest] = principal
    return principals, problems


def _read_entry(client: str, content: bytes) -> tuple[bytes, Principal]:
    """Digest and principal of an entry. Raises ValueError where it is not understood."""
    if len(content) > _MAX_ENTRY_BYTES:
        raise ValueError(f"it is longer than {_MAX_ENTRY_BYTES} bytes: shorten it")
    key, *lines = content.splitlines()
    principal, seen = Principal(client, f"key/{client}", CLASSES["normal"]), set[str]()
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        name, _, value = (part.strip() for part in line.decode(errors="replace").partition(":"))
        if name in seen:
            raise ValueError(f"line {number} sets {name} again: leave it out")
        seen.add(name)
        if (changed := _with_setting(principal, name, value)) is None:
            raise ValueError(f"line {number} is none of {_SETTINGS}")
        principal = changed
    return _digest(key), principal


def _with_setting(principal: Principal, name: str, value: str) -> Principal | None:
    """The principal with one setting of its entry; None where there is no such setting."""
    if name == "group" and _GROUP.fullmatch(value):
        return replace(principal, cache_scope=f"group/{value}")
    if name == "highest-priority" and value in CLASSES:
        return replace(principal, highest_priority=CLASSES[value])
    if name == "highest-priority" and _LEVEL.fullmatch(value) and MIN_PRIORITY <= int(value) <= MAX_PRIORITY:
        return replace(principal, highest_priority=int(value))
    if name == "admin" and value in ("true", "false"):
        return replace(principal, is_admin=value == "true")
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()


def require_key(keys: Keys, scope: Scope) -> None:
    """Note in the scope whose key a request carries. Raises a 401 without one, and a 403 where the path needs
    an admin's.
    """
    principal: Principal | None = Principal()
    if keys.required:
        key = credentials.key_of(scope["headers"])
        principal = keys.principal_of(key) if key else None
    if principal is None:
        raise ApiError(
            401,
            "A valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
            headers=(("www-authenticate", "Bearer"),),
        )
    admit(principal, scope)


def admit(principal: Principal, scope: Scope) -> None:
    """Note in the scope who a request is for. Raises a 403 where the path needs an admin's key."""
    if scope["path"] in ADMIN_PATHS and not principal.is_admin:
        raise ApiError(
            403,
            f"{scope['path']} needs an admin's key: one of --api-keys-dir (security.apiKeysSecretRef) whose "
            "entry has the line 'admin: true'",
            code="admin_key_required",
        )
    scope[PRINCIPAL] = principal
