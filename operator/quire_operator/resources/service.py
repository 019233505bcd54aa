"""The Service: the stable name of the endpoint, behind which only ready pods get requests."""

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
