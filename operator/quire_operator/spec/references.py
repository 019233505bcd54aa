"""Texts that name something else (an object, a variable, an address), and references to objects.

Used by `tree` and its branches. No reference carries a namespace.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_operator.spec.bounds import required_text, text

# Expressions without anchors: the reader and the CRD match the whole text, and optional text may be empty.
DNS_1123_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"({DNS_1123_SUBDOMAIN}/)?{LABEL_VALUE}"
ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
NO_NUL = r"[^\x00]*"
PRINTABLE = r"[^\x00-\x1f\x7f]*"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
HTTP_ADDRESS = rf"https?://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(:{_PORT})?"


@dataclass(frozen=True, kw_only=True)
class SecretKeyRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    key: str = required_text(r"[-._a-zA-Z0-9]+", 253)


@dataclass(frozen=True, kw_only=True)
class ObjectRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    name: str = required_text(ENV_NAME, 128)
    value: str = text(NO_NUL, 4096)
