"""The Services: the stable name of the endpoint, behind which only ready pods get requests, and the name by
which decode pods find prefill pods.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment) -> Manifest:
    service = model.spec.networking.service
    annotations = {"annotations": dict(service.annotations)} if service.annotations else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, model.name) | annotations,
        "spec": {
            "type": service.type,
            "selector": names.selector_labels(model.name),
            "ports": [
                {
                    "name": names.PORT_HTTP_NAME,
                    "port": service.port,
                    "targetPort": names.PORT_HTTP_NAME,
                    "protocol": "TCP",
                }
            ],
        },
    }


def build_of_prefill(model: LLMDeployment) -> Manifest:
    """A headless Service: its name resolves to the addresses of all ready prefill pods, of which a decode pod
    chooses the least loaded.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, model.workload_name),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": names.selector_labels(model.name, model.role),
            "ports": [
                {
                    "name": names.PORT_KV_TRANSFER_NAME,
                    "port": names.PORT_KV_TRANSFER,
                    "targetPort": names.PORT_KV_TRANSFER_NAME,
                    "protocol": "TCP",
                }
            ],
        },
    }
