"""The children of an LLMDeployment as one comparable value: two runs are equal if these are equal.

Left out are values of the API server (uids, versions, addresses), what follows from them (hashes of owner
references), and what other controllers write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from e2e.operator.world import BUDGET, CHILDREN, NAME_LABEL, World

Body = dict[str, Any]

_OF_THE_SERVER = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation")
_HASHES = ("serving.quire.dev/applied-hash", "serving.quire.dev/render-revision")
# Written by the Deployment controller, which recovers later than the operator after an outage.
_OF_CONTROLLERS = ("deployment.kubernetes.io/revision",)
_KINDS = (*CHILDREN, BUDGET, "HorizontalPodAutoscaler", "ControllerRevision")


def children(world: World, namespace: str, name: str, *, history: bool = True) -> dict[str, Body]:
    """Every child by kind and name. `history`: including stored revisions."""
    owner = world.read("LLMDeployment", namespace, name)
    found = [
        {**body, "kind": kind}
        for kind in _KINDS
        for body in world.find(kind, namespace, f"{NAME_LABEL}={name}")
        if "deletionTimestamp" not in body["metadata"]
    ]
    if not history:
        used = json.dumps([body["spec"] for body in found if body["kind"] == "Deployment"])
        found = [
            body
            for body in found
            if body["kind"] != "ControllerRevision"
            and (body["kind"] != "ConfigMap" or f'"{body["metadata"]["name"]}"' in used)
        ]
    alike: dict[str, Body] = {}
    for body in found:
        known = _comparable(body, {str(owner["metadata"]["uid"]): "UID", namespace: "NAMESPACE"})
        key = f"{body['kind']} {known['metadata']['name']}"
        assert key not in alike, f"{key} is there twice"
        alike[key] = known
    return alike


def pods(world: World, namespace: str, name: str) -> set[str]:
    """The uids of its pods that are not terminating."""
    found = world.find("Pod", namespace, f"{NAME_LABEL}={name}")
    return {str(pod["metadata"]["uid"]) for pod in found if "deletionTimestamp" not in pod["metadata"]}


def differences(one: dict[str, Body], other: dict[str, Body]) -> list[str]:
    """The fields that differ, for the message of an assertion."""
    left, right = dict(_leaves(one)), dict(_leaves(other))
    return [
        f"{path}: {left.get(path)!r} != {right.get(path)!r}"
        for path in sorted({*left, *right})
        if left.get(path) != right.get(path)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _leaves(each, f"{path}/{key}")
    if not inner:
        yield path, value


def _comparable(body: Body, names: dict[str, str]) -> Body:
    metadata = {k: v for k, v in body["metadata"].items() if k not in _OF_THE_SERVER}
    annotations = metadata.pop("annotations", {})
    left_out = (*_HASHES, *_OF_CONTROLLERS)
    metadata["annotations"] = {k: v for k, v in annotations.items() if k not in left_out}
    rest = {k: v for k, v in body.items() if k not in ("metadata", "status", "apiVersion")}
    if body["kind"] == "ControllerRevision":
        metadata["name"] = str(rest["revision"])
        metadata["annotations"] = {}  # names of other revisions
    if body["kind"] == "Service":
        rest["spec"] = {k: v for k, v in rest["spec"].items() if not k.startswith("clusterIP")}
        for port in rest["spec"]["ports"]:
            port.pop("nodePort", None)
    text = json.dumps({**rest, "metadata": metadata}, sort_keys=True)
    for old, new in names.items():
        text = re.sub(re.escape(old), new, text)
    result: Body = json.loads(text)
    return result
