"""Decodes JSON of the API server that may be nested deeper than Python's decoder can read.

`json.loads` raises RecursionError for it, and a tenant may store such an object where a CRD has an open
schema. So what lies deeper than MAX_DEPTH is replaced: the object can still be named and reported, and the
others of its list are read as always. Knows neither kinds nor requests.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 100  # no kind of Kubernetes has half of it
TOO_DEEP = "(nested too deeply)"

Report = Callable[[dict[str, Any], str], None]  # the object, and what is wrong with it

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]')


def loads(raw: bytes, report: Report) -> Any:
    """The document, without what is nested deeper than MAX_DEPTH if Python cannot decode it whole. `report`
    gets each object that has lost a part. Raises ValueError if it is no JSON.
    """
    try:
        return json.loads(raw)
    except RecursionError:
        document = json.loads(flatten(raw))
        for body in _flattened_objects(document):
            report(body, f"it is nested deeper than {MAX_DEPTH} levels")
        return document


def decodable(raw: bytes, report: Report) -> bytes:
    """The text itself if `json.loads` can decode it (or if it is no JSON), else the text without what is
    nested deeper than MAX_DEPTH.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return raw
    try:
        json.loads(raw)
    except RecursionError:
        with contextlib.suppress(ValueError):  # its reader says what is wrong
            loads(raw, report)
        return flatten(raw)
    except ValueError:
        pass
    return raw


def flatten(raw: bytes) -> bytes:
    """The JSON text with TOO_DEEP in place of each array and object that lies deeper than MAX_DEPTH."""
    kept: list[bytes] = []
    depth = end = 0
    for match in _STRING_OR_BRACKET.finditer(raw):
        bracket = match.group()
        if bracket in b"[{":
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept.append(raw[end : match.start()])
        elif bracket in b"]}":
            if depth == MAX_DEPTH + 1:
                kept.append(json.dumps(TOO_DEEP).encode())
                end = match.end()
            depth -= 1
    rest = raw[end:] if depth <= MAX_DEPTH else b""  # it ends in the middle
    return b"".join((*kept, rest))


def _flattened_objects(document: Any) -> Iterator[dict[str, Any]]:
    """The Kubernetes objects of a list, a watch event or a single object that have lost a part."""
    if "items" in document:
        kind = str(document.get("kind", "")).removesuffix("List")
        objects = [{"kind": kind, **item} for item in document["items"] or ()]
    else:
        objects = [document.get("object", document)]
    for each in objects:
        if TOO_DEEP in json.dumps(each):
            yield each
