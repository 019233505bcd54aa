"""The part of the spec that says which Gateways lead to the endpoint.

A branch of `tree`, in the same terms: a field here is a property of the CRD.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_operator.errors import SpecError
from quire_operator.spec.bounds import choice, default_text, number, required_text, text, texts
from quire_operator.spec.references import DNS_1123_SUBDOMAIN

DNS_1123_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
HOSTNAME = rf"(\*\.)?{DNS_1123_SUBDOMAIN}"
# What the Gateway API takes as a prefix, without the parts that it refuses (//, /./, /../, an escaped slash).
PATH = r"(/|(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+)"


@dataclass(frozen=True, kw_only=True)
class ParentRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    namespace: str = text(DNS_1123_LABEL, 63)
    section_name: str = text(DNS_1123_SUBDOMAIN, 253)


@dataclass(frozen=True, kw_only=True)
class Route:
    parent_refs: tuple[ParentRef, ...] = field(metadata={"minItems": 1, "maxItems": 8})
    hostnames: tuple[str, ...] = texts(HOSTNAME, 253, 16)
    path: str = default_text("/", PATH, 256)


@dataclass(frozen=True, kw_only=True)
class EndpointPicker:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    port: int = number(1, 65_535, 9002)


@dataclass(frozen=True, kw_only=True)
class InferencePool:
    endpoint_picker_ref: EndpointPicker
    enabled: bool = True
    failure_mode: str = choice("FailClose", "FailOpen")


def check(route: Route | None) -> None:
    """The Gateway API takes two references to one Gateway only with listeners that differ; we take one."""
    if route is None:
        return
    known = [(parent.name, parent.namespace) for parent in route.parent_refs]
    if not known or len(set(known)) < len(known):
        raise SpecError("spec.networking.httpRoute.parentRefs", "give each Gateway once, and at least one")
