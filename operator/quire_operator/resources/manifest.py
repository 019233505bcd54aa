"""What the manifests of all children share: metadata, labels, owner reference, the security of containers.

Manifests are canonical: they equal the live object once the API server has filled in its defaults. So
quantities are written in canonical form, and empty values are omitted.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from quire_operator import names
from quire_operator.spec import LLMDeployment
from quire_operator.spec.reader import camel

Manifest = dict[str, Any]

# Of every container: Pod Security "restricted", and where it leaves the reason of its end.
RESTRICTED_CONTAINER: Manifest = {
    "terminationMessagePath": names.PATH_TERMINATION_LOG,
    "terminationMessagePolicy": "FallbackToLogsOnError",
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
}


def metadata(model: LLMDeployment, name: str) -> Manifest:
    """Metadata of the child `name`, owned by the LLMDeployment (unless that is not stored in a cluster)."""
    result: Manifest = {
        "name": name,
        "namespace": model.namespace,
        "labels": names.child_labels(model.name),
    }
    if model.uid:
        result["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": model.name,
                "uid": model.uid,
                "controller": True,
            }
        ]
    return result


def workload_reference(model: LLMDeployment) -> Manifest:
    """What an autoscaler scales."""
    if model.is_grouped:
        return {"apiVersion": names.GROUP_API_VERSION, "kind": names.GROUP_KIND, "name": model.name}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": model.workload_name}


def pods_of_ranks(model: LLMDeployment) -> Manifest:
    """A selector of the pods of the model's role, and of their workers where a replica is a group."""
    if not model.is_grouped:
        return {"matchLabels": names.selector_labels(model.name, model.role)}
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": [names.ROLE_LEADER, names.ROLE_WORKER]}
    return {"matchLabels": {names.LABEL_NAME: model.name}, "matchExpressions": [roles]}


def compact(value: Manifest) -> Manifest:
    """Without the entries that the user left empty; only for maps whose every entry is optional."""
    return {key: entry for key, entry in value.items() if entry not in (None, "", [], {}, ())}


def literal(text: str) -> str:
    """The text as an argument or a variable of a container, which the kubelet passes on unchanged.

    It would replace $(NAME) by a variable, and a variable of the user's could then bring a flag past the list
    of allowed ones.
    """
    return text.replace("$", "$$")


def as_manifest(value: Any) -> Any:
    """A part of the spec as it stands in YAML. Empty lists, maps and texts are omitted, as the API server
    does; empty objects stay, because an empty selector matches everything and an absent one nothing.
    """
    if is_dataclass(value):
        given = {camel(item.name): getattr(value, item.name) for item in fields(value)}
        return {key: as_manifest(entry) for key, entry in given.items() if entry not in (None, "", (), {})}
    return [as_manifest(each) for each in value] if isinstance(value, tuple) else value
