"""The values and the memory of a body, counted while its bytes come: never less than what parsing makes."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_http.body_size import CONTAINER_WEIGHT, BodySize
from quire_server.api.protocol.validation import parse_object

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    ['"', "\\", '\\"', '[{,}]\\",', "\N{GRINNING FACE}", "\u4e2d\u6587", "\\u", 'a\\\\"b,']
)
VALUES = st.recursive(
    st.integers(-(2**70), 2**70) | st.none() | st.booleans() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def counted(data, cuts=()):
    size = BodySize()
    edges = [0, *sorted(cuts), len(data)]
    for start, end in zip(edges, edges[1:], strict=False):
        size.add(data[start:end])
    return size.num_values, size.memory


def values_in(value):
    """Separators and weighted containers."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return CONTAINER_WEIGHT + max(len(value) - 1, 0) + sum(map(values_in, inner))


def characters_in(value):
    """Bytes of the strings, without what Python puts before each of them."""
    if isinstance(value, str):
        return sys.getsizeof(value) - sys.getsizeof("") if value else 0
    if isinstance(value, dict):
        return sum(map(characters_in, [*value, *value.values()]))
    return sum(map(characters_in, value)) if isinstance(value, list) else 0


@given(st.dictionaries(TEXTS, VALUES, max_size=6), st.booleans(), st.sets(st.integers(1, 300), max_size=6))
def test_counts_are_those_of_the_parsed_values_however_the_bytes_are_split(document, ascii_only, cuts):
    data = json.dumps(document, ensure_ascii=ascii_only).encode()
    num_values, memory = counted(data, {cut for cut in cuts if cut < len(data)})
    parsed = parse_object(data)
    assert parsed == document
    assert num_values == counted(data)[0] == values_in(parsed)
    assert memory >= len(data) + characters_in(parsed)


@pytest.mark.parametrize("emoji", ["\N{GRINNING FACE}", r"\ud83d\ude00"])
@pytest.mark.parametrize("cut", [None, 13, 14, 15, 16])
def test_one_wide_character_makes_all_of_a_text_wide(emoji, cut):
    data = b'{"prompt":"' + emoji.encode() + b"a" * 10_000 + b'"}'
    assert (
        counted(data, () if cut is None else (cut,))[1] > 80_000 > characters_in(parse_object(data)) > 40_000
    )


def test_commas_in_a_text_are_no_values():
    assert counted(b'{"prompt":"' + b"1,[{" * 1000 + b'"}')[0] == CONTAINER_WEIGHT
