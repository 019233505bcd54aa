"""Whether a live object still is what was applied: by the hash of the applied manifest, and field by field.

Where the hash says that an object was applied from this very manifest, the fields are compared as server-side
apply merges them: what other managers added is theirs and no drift, except where the API treats a list or a
map as one value, and except what `take_over` finds to be in the way. Knows no kind but the Job, which never
changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator import names
from quire_operator.observed import Body
from quire_operator.resources import Manifest

# Lists that the API server merges by key (x-kubernetes-list-map-keys); every other list is one value.
_LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
# Ports are merged by another key in each kind that has them, and are one value in a NetworkPolicy.
_PORT_KEYS = (("containerPort", "protocol"), ("port", "protocol"))
_PORT_DEFAULTS = {"protocol": "TCP"}
# Maps that are replaced as one value: an added key changes their meaning.
_ATOMIC_MAPS = frozenset({"matchLabels", "nodeSelector"})


def with_applied_hash(manifest: Body) -> Manifest:
    """The manifest with a hash of its own content as an annotation."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    annotations = {
        **(manifest["metadata"].get("annotations") or {}),
        names.ANNOTATION_APPLIED_HASH: hashlib.sha256(text.encode()).hexdigest(),
    }
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def reason_to_apply(manifest: Manifest, live: Body | None) -> str:
    """Why the manifest has to be applied; empty when it does not."""
    if live is None:
        return "missing"
    if "deletionTimestamp" in live["metadata"] or manifest["kind"] == "Job":
        return ""  # its deletion is an event that triggers a reconcile; a Job is replaced and never changed
    hashes = [
        (body["metadata"].get("annotations") or {}).get(names.ANNOTATION_APPLIED_HASH)
        for body in (manifest, live)
    ]
    if hashes[0] != hashes[1]:
        return "lost its hash" if not hashes[1] else "changed"
    lost = lost_fields(manifest, live)
    return f"lost {', '.join(lost[:3])}" if lost else ""


def lost_fields(desired: Any, live: Any, path: str = "") -> list[str]:
    """Paths of the fields of `desired` that `live` does not have with the same value."""
    # Both consist of plain dicts and lists; isinstance checks against Mapping and Sequence cost a third of
    # the time.
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return [path or "everything"]
        return _lost_in_map(desired, live, path)
    if isinstance(desired, list | tuple):
        if not isinstance(live, list):
            return [path]
        return _lost_in_list(desired, live, path)
    return [] if desired == live and isinstance(desired, bool) == isinstance(live, bool) else [path]


def _lost_in_map(desired: Mapping[str, Any], live: Mapping[str, Any], path: str) -> list[str]:
    if path.rpartition(".")[2] in _ATOMIC_MAPS or path == "spec.selector":
        return [] if dict(desired) == dict(live) else [path]
    return [
        lost
        for key, value in desired.items()
        for lost in (
            lost_fields(value, live[key], f"{path}.{key}" if path else key)
            if key in live
            else [f"{path}.{key}" if path else key]
        )
    ]


def _lost_in_list(desired: Sequence[Any], live: Sequence[Any], path: str) -> list[str]:
    keys = list_keys(path, desired)
    if not keys:
        if len(desired) != len(live):
            return [path]
        pairs = enumerate(zip(desired, live, strict=True))
        return [lost for i, (want, have) in pairs for lost in lost_fields(want, have, f"{path}[{i}]")]
    found = {item_key(item, keys): item for item in live if isinstance(item, Mapping)}
    return [
        lost
        for item in desired
        for lost in (
            lost_fields(item, found[item_key(item, keys)], f"{path}[{item_key(item, keys)[0]}]")
            if item_key(item, keys) in found
            else [f"{path}[{item_key(item, keys)[0]}]"]
        )
    ]


def list_keys(path: str, items: Sequence[Any]) -> tuple[str, ...]:
    """By which keys the API server merges the list at `path`; none where it is one value."""
    field = path.rpartition(".")[2]
    if field != "ports":
        return _LIST_KEYS.get(field, ())
    if path == "spec.ports":
        return _PORT_KEYS[1]
    if items and isinstance(items[0], Mapping) and "containerPort" in items[0]:
        return _PORT_KEYS[0]
    return ()


def item_key(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    """What identifies an item of a list that is merged by `keys`."""
    return tuple(item.get(key, _PORT_DEFAULTS.get(key)) for key in keys)
