"""The NetworkPolicies of the serving pods and of the download Job.

Serving pods accept API requests from their own namespace and from the peers in the spec; the health port is
open to the operator and to monitoring. They may connect to DNS and to the trace collector only: a model on a
volume needs nothing else, so a compromised process cannot send data out. A pod that downloads may also use
its source's ports.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from quire_operator import names
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.settings import Settings
from quire_operator.spec import LabelSelector, LLMDeployment, Peer

_METADATA_NAME = "kubernetes.io/metadata.name"
_DNS: Manifest = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def build(model: LLMDeployment, settings: Settings) -> Manifest:
    """The policy of the serving pods; there is none with mode None."""
    api, health = _tcp(names.PORT_HTTP), _tcp(names.PORT_HEALTH)
    watchers = [{_METADATA_NAME: settings.operator_namespace}, dict(settings.monitoring_namespace_labels)]
    allowed = [_peer(peer) for peer in model.spec.networking.network_policy.allow_from]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, model.name),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(model.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [{"podSelector": {}}, *allowed], "ports": [api]},
                {
                    "from": [{"namespaceSelector": {"matchLabels": labels}} for labels in watchers],
                    "ports": [api, health],
                },
            ],
            "egress": [
                _DNS,
                *_to_collector(model.spec.observability.tracing.endpoint),
                *([] if model.spec.cache is not None and model.spec.cache.is_shared else _to_source(model)),
            ],
        },
    }


def build_of_download(model: LLMDeployment, settings: Settings) -> Manifest:
    """The policy of the download Job: it may connect to its source, and the operator may poll its
    progress.
    """
    operator = {"matchLabels": {_METADATA_NAME: settings.operator_namespace}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, model.download_name),
        "spec": {
            "podSelector": {"matchLabels": names.fetcher_labels(model.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"namespaceSelector": operator}], "ports": [_tcp(names.PORT_HEALTH)]}],
            "egress": [_DNS, *_to_source(model)],
        },
    }


def _to_collector(endpoint: str) -> list[dict[str, Any]]:
    """As narrow as the endpoint allows: one address, the namespace of a Service or, because a policy cannot
    contain DNS names, its port on any host.
    """
    if not endpoint:
        return []
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    rule: dict[str, Any] = {"ports": [_tcp(port)]}
    labels = host.split(".")
    try:
        return [{"to": [{"ipBlock": {"cidr": str(ipaddress.ip_network(host))}}], **rule}]
    except ValueError:
        pass
    if len(labels) == 1:
        return [{"to": [{"podSelector": {}}], **rule}]
    if len(labels) == 2 or labels[2] == "svc":
        namespace = {"matchLabels": {_METADATA_NAME: labels[1]}}
        return [{"to": [{"namespaceSelector": namespace}], **rule}]
    return [rule]


def _to_source(model: LLMDeployment) -> list[dict[str, Any]]:
    """Hubs and object stores have many addresses, so only ports are restricted: HTTPS, and those of private
    endpoints, registries and proxies in the spec.
    """
    cache = model.spec.cache
    if cache is None:
        return []
    source = model.spec.model.source
    addresses = [source.endpoint, f"https://{source.oci.reference}" if source.oci is not None else ""]
    addresses += [item.value for item in cache.download.env if item.name.lower().endswith("_proxy")]
    ports = {443, *(port for address in addresses if (port := _port(address)))}
    return [{"ports": [_tcp(port) for port in sorted(ports)]}]


def _port(address: str) -> int:
    """0 where the address names none and implies none."""
    parts = urlsplit(address)
    try:
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return 0


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def _peer(peer: Peer) -> dict[str, Any]:
    """An empty selector means everything and must stay; an absent one means nothing and must not appear."""
    if peer.ip_block is not None:
        return {"ipBlock": {"cidr": peer.ip_block.cidr}}
    selectors = {"namespaceSelector": peer.namespace_selector, "podSelector": peer.pod_selector}
    return {key: _selector(selector) for key, selector in selectors.items() if selector is not None}


def _selector(selector: LabelSelector) -> dict[str, Any]:
    expressions = [
        compact({"key": item.key, "operator": item.operator, "values": list(item.values)})
        for item in selector.match_expressions
    ]
    return compact({"matchLabels": dict(selector.match_labels), "matchExpressions": expressions})
