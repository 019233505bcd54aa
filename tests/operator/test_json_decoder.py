"""JSON of the API server is decoded whatever it contains; what lies too deep is replaced and reported."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator import json_decoder
from quire_operator.json_decoder import MAX_DEPTH, TOO_DEEP

DEPTHS = (MAX_DEPTH - 2, MAX_DEPTH * 2, sys.getrecursionlimit() - 50, sys.getrecursionlimit() + 200, 9000)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def nested(depth: int, opened: str, closed: str) -> str:
    return opened * depth + "0" + closed * depth


def decoded(raw: str) -> tuple[Any, list[str]]:
    """The document, and the names of the objects that were reported."""
    reported: list[str] = []

    def report(body: dict[str, Any], why: str) -> None:
        assert str(MAX_DEPTH) in why
        reported.append(f"{body.get('kind')} {body['metadata']['name']}")

    return json_decoder.loads(raw.encode(), report), reported


def body(name: str, raw: str = "0") -> str:
    return f'{{"metadata": {{"name": {json.dumps(name)}}}, "spec": {raw}}}'


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}"), ('[{"]}":', "}]")])
def test_a_deep_object_keeps_its_name_and_the_others_of_its_list_are_whole(
    depth: int, opened: str, closed: str
) -> None:
    items = ", ".join((body("a"), body("deep", nested(depth, opened, closed)), body("b", '{"x": [1]}')))
    document, reported = decoded(f'{{"kind": "ThingList", "items": [{items}]}}')

    first, deep, last = document["items"]
    assert (first["metadata"]["name"], first["spec"]) == ("a", 0)
    assert (last["metadata"]["name"], last["spec"]) == ("b", {"x": [1]})
    assert deep["metadata"]["name"] == "deep"
    assert reported == (["Thing deep"] if TOO_DEEP in json.dumps(deep) else [])
    if depth > sys.getrecursionlimit():
        assert reported, "Python cannot decode it whole"


def test_the_object_of_a_watch_event_is_named() -> None:
    event = f'{{"type": "ADDED", "object": {body("deep", nested(9000, "[", "]"))}}}'
    document, reported = decoded(event)
    assert document["type"] == "ADDED"
    assert reported == ["None deep"]


@given(value=_VALUES)
def test_what_python_can_decode_is_unchanged(value: Any) -> None:
    raw = json.dumps(value).encode()

    def unexpected(body: dict[str, Any], why: str) -> None:
        raise AssertionError(why)

    assert json_decoder.loads(raw, unexpected) == value
    assert json_decoder.decodable(raw, unexpected) == raw
    assert json_decoder.flatten(raw) == raw


@pytest.mark.parametrize("raw", [b"", b"[", b'{"a": ' * 5000, b"\xff", b'"\\', b"nope"])
def test_what_is_no_json_is_a_value_error_and_passes_through_a_watch(raw: bytes) -> None:
    def ignore(body: dict[str, Any], why: str) -> None:
        pass

    with pytest.raises(ValueError):
        json_decoder.loads(raw, ignore)
    assert json_decoder.decodable(raw, ignore) in (raw, json_decoder.flatten(raw))


def test_text_that_is_no_json_is_left_to_its_reader_whatever_its_depth() -> None:
    broken = b"[]" * (MAX_DEPTH + 1)
    assert json_decoder.decodable(broken, lambda body, why: pytest.fail(why)) == broken
