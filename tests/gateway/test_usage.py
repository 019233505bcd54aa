"""What an answer says it took, in bytes as replicas send them."""

import itertools
import json

import pytest

from quire_gateway.usage import Usage, find, find_in_comment, find_last, without_comment

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
CACHED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 8}}
COMMENT = b": usage " + json.dumps(CACHED).encode() + b"\n\n"


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_usage_of_an_answer_is_found_where_it_has_one(separators):
    def encoded(document):
        return json.dumps(document, separators=separators).encode()

    assert find(encoded({"choices": [], "usage": CACHED})) == Usage(12, 3, 8)
    assert find(b"data: " + encoded({"usage": USAGE}) + b"\n\n") == Usage(12, 3)
    assert find(encoded({"usage": None})) is None
    both = encoded({"usage": {**USAGE, "completion_tokens": 1}}) + b"\n\n" + encoded({"usage": CACHED})
    assert find(both) == Usage(12, 3, 8), "the last one is the whole"


@pytest.mark.parametrize(
    "order", [*itertools.permutations(("completion_tokens", "prompt_tokens", "details"))]
)
def test_the_fields_of_a_usage_may_have_any_order(order):
    values = {"completion_tokens": 3, "prompt_tokens": 12, "details": {"cached_tokens": 8}}
    found = json.dumps({name: values[name] for name in order}).encode()
    before = b'data: {"usage": {"prompt_tokens": 12, "completion_tokens": 1, "d": {"cached_tokens": 1}}}\n\n'
    for usage in (b'data: {"choices": [], "usage": ' + found + b"}", b": usage " + found):
        assert find(before + usage + b"\n\n") == find(usage) == Usage(12, 3, 8)


def test_a_usage_in_other_words_is_the_last_one_whatever_a_call_has_in_it():
    """The input of a call is an object of the model's, whose keys a client may have chosen."""
    said = {"input_tokens": 4, "cache_read_input_tokens": 8, "output_tokens": 3}
    fake = {"usage": {"input_tokens": 0, "output_tokens": 0, "prompt_tokens": 0}}
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps({"content": [{"input": fake}], "usage": said}, separators=separators).encode()
        assert find_last(body) == Usage(12, 3, 8)
    assert find_last(b'{"usage": {"input_tokens": 12, "output_tokens": 3}}') == Usage(12, 3)
    within = b'{"usage":{"input_tokens":12,"d":{"cached_tokens":8},"output_tokens":3}}'
    assert find_last(within) == Usage(12, 3, 8)
    assert find_last(b'{"usage": null}') is None and find_last(b'{"input_tokens": "x"}') is None


def test_a_text_that_looks_like_a_usage_is_none():
    text = json.dumps({"usage": {**CACHED, "prompt_tokens": 999_999}})
    for document in ({"text": text}, {"text": json.dumps(text)}, {"text": COMMENT.decode()}):
        assert find(json.dumps(document).encode()) is None
        event = b"data: " + json.dumps(document).encode() + b"\n\n"
        assert without_comment(event) == event


@pytest.mark.parametrize("before", [b"", b'data: {"text": "a"}\n\n', b'data: {"text": "disk: usage 9"}\n\n'])
@pytest.mark.parametrize("after", [b"", b"data: [DONE]\n\n"])
def test_the_comment_is_for_the_gateway_alone(before, after):
    assert find(before + COMMENT + after) == Usage(12, 3, 8)
    assert without_comment(before + COMMENT + after) == before + after


def test_a_part_of_an_event_that_begins_like_the_comment_is_passed_on():
    assert without_comment(b": usage of a text") == b": usage of a text"


def test_what_events_say_is_no_usage_and_the_comment_is_whatever_they_repeat_of_a_client():
    fake = {"usage": {"input_tokens": 0, "output_tokens": 0, "prompt_tokens": 0, "completion_tokens": 0}}
    event = b"data: " + json.dumps({"response": {"tools": [{"parameters": fake}]}}).encode() + b"\n\n"
    begun = b'data: {"type": "message_start", "message": {"usage": {"input_tokens": 5}}}\n\n'
    assert find_in_comment(begun + event) is None
    for events in (COMMENT, event + COMMENT, COMMENT + event, begun + event + COMMENT + event):
        assert find_in_comment(events) == Usage(12, 3, 8)
