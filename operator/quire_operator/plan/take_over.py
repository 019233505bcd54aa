"""What other managers put into an object and must not stay there, and how the operator comes to own it.

Server-side apply adds our part of a list and leaves the parts of others alone. That is right for a sidecar or
a label, but not where the two exclude each other: a port that was edited by hand is another entry, since
ports are merged by their number, and the API server refuses two of the same name. So what is in the way is
first made ours in the managed fields, which changes nothing else of the object; the apply that follows leaves
it out, and what the last owner leaves out is removed. One change of the object: pods are replaced once, and a
Service keeps its address.

Pure; sends no request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_operator import names
from quire_operator.observed import Body
from quire_operator.plan.drift import item_key, list_keys

# A field of an object: an element for each level, as managed fields spell them.
FieldPath = tuple[str, ...]

_CONTAINERS = frozenset({"containers", "initContainers"})
# Lists without a name that would show which of our items another one replaced: where one of ours is missing,
# those of others are its replacement. A second server in the pod would take the port of ours.
_REPLACED = _CONTAINERS | {"topologySpreadConstraints"}
# Fields of which the API server accepts one.
_ALTERNATIVES: tuple[frozenset[str], ...] = (
    frozenset({"value", "valueFrom"}),
    frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"}),
    frozenset({"maxUnavailable", "minAvailable"}),
)
# Maps that name a kind and its parameters: a volume's source, a security profile.
_ONE_VALUE = frozenset({"volumes", "seccompProfile"})


def in_the_way(manifest: Body, live: Body) -> Iterator[FieldPath]:
    """What of `live` must not stay when the manifest is applied."""
    yield from _within(manifest.get("spec"), live.get("spec"), ("f:spec",), "spec")


def _within(desired: Any, live: Any, path: FieldPath, field: str) -> Iterator[FieldPath]:
    """`field`: the name of the field at `path`, of the list where that is an item."""
    if isinstance(desired, dict) and isinstance(live, dict):
        yield from ((*path, f"f:{key}") for key in live if _excludes(desired, key, field))
        for key, value in desired.items():
            yield from _within(value, live.get(key), (*path, f"f:{key}"), key)
    elif isinstance(desired, list | tuple) and isinstance(live, list):
        yield from _in_list(desired, live, path, field)


def _excludes(desired: Mapping[str, Any], key: str, field: str) -> bool:
    if key in desired:
        return False
    return field in _ONE_VALUE or any(key in fields and fields & desired.keys() for fields in _ALTERNATIVES)


def _in_list(desired: Sequence[Any], live: Sequence[Any], path: FieldPath, field: str) -> Iterator[FieldPath]:
    keys = list_keys(".".join(part.removeprefix("f:") for part in path), desired or live)
    if not keys:
        return
    wanted = {item_key(item, keys): item for item in desired}
    found = {item_key(item, keys): item for item in live if isinstance(item, Mapping)}
    names_in_use = {item["name"] for item in desired if "name" in item}
    is_replaced = field in _REPLACED and not wanted.keys() <= found.keys()
    for key, item in found.items():
        place = (*path, _element(keys, key))
        if key in wanted:
            # The list is looked at where we have no variables, too.
            ours = {"env": (), **wanted[key]} if field in _CONTAINERS else wanted[key]
            yield from _within(ours, item, place, field)
        elif (
            is_replaced
            or (field == "ports" and item.get("name") in names_in_use)
            or (field == "env" and str(item.get("name", "")).startswith(names.ENV_PREFIX))
        ):
            yield place


def _element(keys: Sequence[str], values: Sequence[Any]) -> str:
    """`k:{"name":"x"}`, as the API server writes it."""
    return "k:" + json.dumps(dict(sorted(zip(keys, values, strict=True))), separators=(",", ":"))


def described(path: FieldPath) -> str:
    """The path in words for the log: `spec.ports[8080]`."""
    text = ""
    for part in path:
        if part.startswith("k:"):
            text += f"[{next(iter(json.loads(part.removeprefix('k:')).values()))}]"
        else:
            text += f".{part.removeprefix('f:')}"
    return text.removeprefix(".")


def managed_fields(live: Body, paths: Sequence[FieldPath]) -> list[dict[str, Any]]:
    """The managed fields of `live`, in which the operator's apply is the only owner of `paths`."""
    ours = {"manager": names.FIELD_MANAGER, "operation": "Apply"}
    claims = [json.loads(json.dumps(claim)) for claim in live["metadata"].get("managedFields") or ()]
    own = next((claim for claim in claims if ours.items() <= claim.items()), None)
    if own is None:
        own = {**ours, "apiVersion": live["apiVersion"], "fieldsType": "FieldsV1", "fieldsV1": {}}
        claims.append(own)
    for path in paths:
        for claim in claims:
            if claim is not own:
                _remove(claim.get("fieldsV1") or {}, path)
        _add(own["fieldsV1"], path)
    return [claim for claim in claims if claim.get("fieldsV1")]


def _remove(fields: dict[str, Any], path: FieldPath) -> None:
    first, *rest = path
    if not rest:
        fields.pop(first, None)
    elif first in fields:
        _remove(fields[first], tuple(rest))
        if not fields[first]:
            del fields[first]


def _add(fields: dict[str, Any], path: FieldPath) -> None:
    for part in path:
        fields = fields.setdefault(part, {})
    if path[-1].startswith("k:"):
        fields.setdefault(".", {})
