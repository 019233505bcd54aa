"""The keys of external backends: files of Secrets that the chart mounts, for the hosts that it names.

The gateway has no right on Secrets. A key goes only to hosts, and is for objects of namespaces, that the
operator of the gateway has listed: else a person who may create a backend could have it sent anywhere. Files
are read again when they change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire_gateway.llm_external_backend import LLMExternalBackend

_VALUE = re.compile(r"[\x21-\x7e]{1,4096}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MountedSecret:
    """One Secret. ``hosts``: ``*.example.com`` is every name that ends so; ``namespaces``: none for all."""

    name: str
    hosts: tuple[str, ...]
    namespaces: tuple[str, ...] = ()

    def is_for(self, backend: LLMExternalBackend) -> bool:
        """Whether this backend may have it."""
        if self.namespaces and backend.namespace not in self.namespaces:
            return False
        host = backend.host
        return any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in self.hosts)


class SecretError(Exception):
    """There is no key for a backend. ``reason`` is that of its condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ExternalSecrets:
    """Those of one gateway, each a directory by its name."""

    def __init__(self, directory: Path, secrets: Iterable[MountedSecret] = ()) -> None:
        self._directory = directory
        self._secrets = {one.name: one for one in secrets}
        self._read: dict[Path, tuple[tuple[int, int], str]] = {}  # with the file's identity

    def key(self, backend: LLMExternalBackend) -> str:
        """The key to send, "" where it has none. Raises SecretError."""
        ref = backend.api_key
        if ref is None:
            return ""
        secret = self._secrets.get(ref.name)
        if secret is None:
            message = f"Secret {ref.name} is not mounted: add it to the chart's gateway.externalSecrets."
            raise SecretError("SecretNotMounted", message)
        if not secret.is_for(backend):
            message = (
                f"Secret {ref.name} is not for {backend.host} and namespace {backend.namespace}: "
                "see hosts and namespaces in the chart's gateway.externalSecrets."
            )
            raise SecretError("SecretNotAllowed", message)
        return self._value(self._directory / ref.name / ref.key)

    def problem(self, backend: LLMExternalBackend) -> tuple[str, str] | None:
        """The reason and the message where there is no key, for its condition."""
        try:
            self.key(backend)
        except SecretError as error:
            return error.reason, str(error)
        return None

    def _value(self, path: Path) -> str:
        try:
            found = path.stat()
            identity = (found.st_ino, found.st_mtime_ns)
            known = self._read.get(path)
            if known is not None and known[0] == identity:
                return known[1]
            text = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            name = f"{path.parent.name}, key {path.name}"
            message = f"Secret {name} cannot be read in the gateway's pod: {type(error).__name__}."
            raise SecretError("SecretNotMounted", message) from None
        if _VALUE.fullmatch(text) is None:
            message = f"Secret {path.parent.name}, key {path.name} is no key: use one line of ASCII."
            raise SecretError("SecretInvalid", message)
        self._read[path] = identity, text
        return text
