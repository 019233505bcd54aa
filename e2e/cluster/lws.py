"""LeaderWorkerSet's controller and webhooks, as one process beside an API server: which objects it needs, its
configuration and its command line.

Its release is a Deployment with a Service and a certificate from its own Secret. Here it is a program that
`programs` builds from its Go module, and the API server reaches its webhooks at an address. Pure but for the
module's files; `e2e.operator.groups` and `lifecycle` start it.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from e2e.cluster import modules, pki

Manifest = dict[str, Any]

WEBHOOK_PORT = 9443
MODULE = "sigs.k8s.io/lws@v0.9.0"
_CRDS = (
    (
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
        "92382b4a4eac032dbbce7eb9bb1e4e7e99880a30656f90649aeb284ce9dc732a",
    ),
    (  # not used, but its controller waits for it
        "config/crd/bases/disaggregatedset.x-k8s.io_disaggregatedsets.yaml",
        "bfe2965d16d93c9fb1f0acc92ad3cb00d18a8c7727496c90c71722f3c5a1c995",
    ),
)
_WEBHOOKS = (
    "config/webhook/manifests.yaml",
    "4918f2be82a6cbf6b7796a95124c0af0f5ce42cc4fb30e1afde0f487488605af",
)
# As in its release: otherwise no pod of the cluster could be created while the controller is away.
_PODS_OF_GROUPS = {
    "matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}],
}
_PODS = ("mpod.kb.io", "vpod.kb.io")


def crds() -> list[Manifest]:
    """The CRDs of its API. Without descriptions, which are four fifths of their 650 KB."""
    return [_undescribed(modules.crd(MODULE, path, digest)) for path, digest in _CRDS]


def webhooks(url: str, authority: Path) -> list[Manifest]:
    """Its two webhook configurations for a server at `url`, whose certificate `authority` has signed."""
    found = modules.load(MODULE, *_WEBHOOKS)
    bundle = base64.b64encode(authority.read_bytes()).decode()
    for document in found:
        document["metadata"]["name"] = f"lws-{document['metadata']['name']}"
        for webhook in document["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {"url": f"{url}{path}", "caBundle": bundle}
            if webhook["name"] in _PODS:
                webhook["objectSelector"] = _PODS_OF_GROUPS
    return found


def identity(address: str) -> pki.Identity:
    """Who the controller is to the API server, and where its webhooks answer."""
    return pki.Identity("lws", "lws-controller", groups=("system:masters",), serves=(address,))


def configuration(address: str, port: int, certificates: Path) -> str:
    """Its configuration file (JSON is YAML). `certificates`: directory with tls.crt and tls.key."""
    return json.dumps(
        {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "webhook": {"host": address, "port": port, "certDir": str(certificates)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
        }
    )


def command(bin_dir: Path, configuration_file: Path, kubeconfig: Path) -> list[str]:
    """The command line."""
    return [str(bin_dir / "lws"), f"--config={configuration_file}", f"--kubeconfig={kubeconfig}"]


def _undescribed(value: Any) -> Any:
    """Without the texts called description. Properties of that name are objects and stay."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key != "description" or not isinstance(one, str)}
        return {key: _undescribed(one) for key, one in kept.items()}
    return [_undescribed(one) for one in value] if isinstance(value, list) else value
