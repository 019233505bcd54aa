"""The NetworkPolicies of the serving pods, the prefill pods and the download Job.

Serving pods accept API requests from their own namespace and from the peers in the spec; the health port is
open to the operator and to monitoring. Prefill pods accept decode pods of the same LLMDeployment and no
clients; with NIXL each role accepts the other one at its ports. All of them may connect to DNS and to the
trace collector only: a model on a volume needs nothing else, so a compromised process cannot send data out.
A pod that downloads its model or adapters may also use the ports of their sources. Pods of groups reach one
another at every port, because gloo and NCCL choose theirs, and do not authenticate: these ports are open to
no other pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources.manifest import Manifest, as_manifest, metadata, pods_of_ranks
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import Source

_METADATA_NAME = "kubernetes.io/metadata.name"
# Any pod and any address but the link-local ones and EC2's, where nodes get the credentials of their own
# cloud identity. A rule of address ranges alone leaves out pods with some network plugins.
_OF_NODES = tuple(map(ipaddress.ip_network, ("169.254.0.0/16", "fd00:ec2::/32", "fe80::/10")))
ANYWHERE: list[Manifest] = [
    {"namespaceSelector": {}},
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": [str(own) for own in _OF_NODES if own.version == 4]}},
    {"ipBlock": {"cidr": "::/0", "except": [str(own) for own in _OF_NODES if own.version == 6]}},
]
# Where pods get the credentials of their ServiceAccount: GKE's metadata server, EKS's pod identity agent. AKS
# and roles of EKS's service accounts need HTTPS only.
_IDENTITY = {
    "GKE": (("169.254.169.252/32", "169.254.169.254/32"), (80, 988)),
    "EKS": (("169.254.170.23/32", "fd00:ec2::23/128"), (80,)),
}
_DNS: Manifest = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def build(model: LLMDeployment, settings: Settings) -> Manifest:
    """The policy of the pods of the model's role; there is none with mode None."""
    api, health = _tcp(names.PORT_HTTP), _tcp(names.PORT_HEALTH)
    group = [{"podSelector": pods_of_ranks(model)}] if model.is_grouped else []
    watchers = [{_METADATA_NAME: settings.operator_namespace}, dict(settings.monitoring_namespace_labels)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, model.workload_name),
        "spec": {
            "podSelector": pods_of_ranks(model),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                _from_users(model),
                *_by_nixl(model, "from"),
                *([{"from": group}] if group else []),
                {
                    "from": [{"namespaceSelector": {"matchLabels": labels}} for labels in watchers],
                    "ports": [api, health],
                },
            ],
            "egress": [
                _DNS,
                *([{"to": group}] if group else []),
                *_to_prefill(model),
                *_by_nixl(model, "to"),
                *_to_collector(model.spec.observability.tracing.endpoint),
                *_to_sources(model, [*_of_model(model), *_of_adapters(model)]),
            ],
        },
    }


def _from_users(model: LLMDeployment) -> Manifest:
    """Who uses the pods: clients of the API, or decode pods where they are prefill pods."""
    if model.role == names.ROLE_PREFILL:
        decode = {"podSelector": {"matchLabels": names.selector_labels(model.name)}}
        return {"from": [decode], "ports": [_tcp(names.PORT_KV_TRANSFER)]}
    allowed = [as_manifest(peer) for peer in model.spec.networking.network_policy.allow_from]
    return {"from": [{"podSelector": {}}, *allowed], "ports": [_tcp(names.PORT_HTTP)]}


def _to_prefill(model: LLMDeployment) -> list[Manifest]:
    """From decode pods to the prefill pods of the same LLMDeployment."""
    if model.role == names.ROLE_PREFILL or model.spec.disaggregation is None:
        return []
    prefill = {"podSelector": {"matchLabels": names.selector_labels(model.name, names.ROLE_PREFILL)}}
    return [{"to": [prefill], "ports": [_tcp(names.PORT_KV_TRANSFER)]}]


def _by_nixl(model: LLMDeployment, direction: str) -> list[Manifest]:
    """Pods of both roles connect to each other, at ports without authentication, where no other pod may
    connect.
    """
    roles = model.spec.disaggregation
    if roles is None or roles.transport != "NIXL":
        return []
    other = names.ROLE_LEADER if model.role == names.ROLE_PREFILL else names.ROLE_PREFILL
    peer = {"podSelector": {"matchLabels": names.selector_labels(model.name, other)}}
    first, last = names.PORTS_NIXL
    return [{direction: [peer], "ports": [{**_tcp(first), "endPort": last}]}]


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
            "egress": [_DNS, *_to_sources(model, [model.spec.model.source])],
        },
    }


def _to_collector(endpoint: str) -> list[dict[str, Any]]:
    """As narrow as the endpoint allows: one address, the namespace of a Service or, because a policy cannot
    contain DNS names, its port on any host. Raises SpecError for an address at which nodes get credentials.
    """
    if not endpoint:
        return []
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    rule: dict[str, Any] = {"ports": [_tcp(port)]}
    labels = host.split(".")
    try:
        address = ipaddress.ip_network(host)
    except ValueError:
        pass
    else:
        if any(address.version == own.version and address.subnet_of(own) for own in _OF_NODES):  # type: ignore[arg-type]
            raise SpecError(
                "spec.observability.tracing.endpoint",
                "a link-local address is no collector: give its Service",
            )
        return [{"to": [{"ipBlock": {"cidr": str(address)}}], **rule}]
    if len(labels) == 1:
        return [{"to": [{"podSelector": {}}], **rule}]
    if len(labels) == 2 or labels[2] == "svc":
        namespace = {"matchLabels": {_METADATA_NAME: labels[1]}}
        return [{"to": [{"namespaceSelector": namespace}], **rule}]
    return [{"to": ANYWHERE, **rule}]


def _of_model(model: LLMDeployment) -> list[Source]:
    """The source that each pod downloads its model from; none where a claim has it, or a Job downloads."""
    cache = model.spec.cache
    return [] if cache is None or cache.is_shared else [model.spec.model.source]


def _of_adapters(model: LLMDeployment) -> list[Source]:
    """The sources that each pod downloads adapters from."""
    return [adapter.source for adapter in model.spec.adapters if adapter.source.pvc is None]


def ports_of_adapters(model: LLMDeployment) -> list[int]:
    """The ports that pods may use outside for their adapters; none where they download none."""
    return _ports(model, _of_adapters(model))


def _to_sources(model: LLMDeployment, sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Hubs and object stores have many addresses, so only ports are restricted: HTTPS, and those of private
    endpoints, registries and proxies in the spec. Nodes' own identities are out of reach; that of the pods'
    account is open if the spec asks for it.
    """
    if not sources:
        return []
    return [
        {"to": ANYWHERE, "ports": [_tcp(port) for port in _ports(model, sources)]},
        *_to_identity(model.spec.security.identity.workload),
    ]


def _ports(model: LLMDeployment, sources: Sequence[Source]) -> list[int]:
    """HTTPS, and the ports of these sources' addresses and of proxies; none without a source."""
    if not sources:
        return []
    cache = model.spec.cache
    addresses = [source.endpoint for source in sources]
    addresses += [f"https://{source.oci.reference}" for source in sources if source.oci is not None]
    if cache is not None:
        addresses += [item.value for item in cache.download.env if item.name.lower().endswith("_proxy")]
    return sorted({443, *(port for address in addresses if (port := _port(address)))})


def _to_identity(workload: str) -> list[dict[str, Any]]:
    if workload not in _IDENTITY:
        return []
    addresses, ports = _IDENTITY[workload]
    return [
        {
            "to": [{"ipBlock": {"cidr": address}} for address in addresses],
            "ports": [_tcp(port) for port in ports],
        }
    ]


def _port(address: str) -> int:
    """0 where the address names none and implies none."""
    try:
        parts = urlsplit(address)
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return 0


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}
