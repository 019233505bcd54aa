"""The environment variables with the place of a pod in its group.

LeaderWorkerSet puts variables of its own in front of them, to which $(NAME) refers. The other settings are
the same for all pods and come from the ConfigMap.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment) -> list[Manifest]:
    """Empty where a replica is one pod."""
    if not model.is_grouped:
        return []
    delay = {"name": names.start_delay(model.name), "key": names.START_DELAY_KEY, "optional": True}
    return [
        {"name": "QUIRE_NODE_RANK", "value": "$(LWS_WORKER_INDEX)"},
        {"name": "QUIRE_LEADER_ADDRESS", "value": "$(LWS_LEADER_ADDRESS)"},
        _from_field("QUIRE_POD_ADDRESS", "status.podIP"),
        _from_field("QUIRE_REVISION", f"metadata.labels['{names.LABEL_GROUP_REVISION}']"),
        # Read anew by each pod that starts, so that another delay is no new revision.
        {"name": "QUIRE_START_DELAY_SECONDS", "valueFrom": {"configMapKeyRef": delay}},
    ]


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
