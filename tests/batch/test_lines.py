"""The lines of an input file, whatever the pieces that it comes in, and what their answers mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_batch import objects, outcome
from quire_batch.lines import MAX_LINE_BYTES, LineError, parse, request, split
from quire_batch.outcome import Answer, Verdict, judge
from quire_batch.records import LineState, Result
from tests.batch.launch import CHAT, line


@given(st.binary(max_size=200).map(lambda data: data.replace(b"x", b"\n")), st.data())
def test_lines_are_the_same_for_any_pieces(content, data):
    whole = [(number, one.strip()) for number, one in enumerate(content.split(b"\n"), 1) if one.strip()]
    parts, left = [], content
    while left:
        size = data.draw(st.integers(1, len(left)))
        parts.append(left[:size])
        left = left[size:]
    assert list(split(parts)) == whole


def test_of_a_line_that_is_too_long_no_more_is_kept_than_shows_it():
    long = (b"y" * (1 << 20) for _ in range(9))
    found = list(split([b"a\n", *long, b"\nb"]))
    assert [(number, len(data)) for number, data in found] == [(1, 1), (2, MAX_LINE_BYTES + 1), (3, 1)]
    with pytest.raises(LineError, match="longer"):
        parse(*found[1], CHAT)


def test_a_request_is_sent_as_it_was_submitted():
    given_line = line(1, temperature=0.1, seed=7, logit_bias={"5": -100}, content="Grüße \u2028")
    assert json.loads(parse(3, json.dumps(given_line).encode(), CHAT).body) == given_line["body"]


@pytest.mark.parametrize(
    ("status", "headers", "failures", "verdict"),
    [
        (200, {}, 0, Verdict.DONE),
        (400, {}, 0, Verdict.FAILED),
        (401, {}, 0, Verdict.FAILED),
        (404, {}, 0, Verdict.FAILED),
        (429, {}, 9, Verdict.REFUSED),
        (429, {"x-should-retry": "false"}, 0, Verdict.FAILED),
        (503, {"retry-after": "7"}, 9, Verdict.REFUSED),
        (503, {"x-should-retry": "false"}, 0, Verdict.FAILED),
        (0, {}, 9, Verdict.REFUSED),
        (500, {}, 0, Verdict.AGAIN),
        (502, {}, 3, Verdict.AGAIN),
        (504, {}, 4, Verdict.FAILED),
    ],
)
def test_what_an_answer_means(status, headers, failures, verdict):
    assert judge(Answer(status, "id", b"{}", headers), failures).verdict is verdict


@pytest.mark.parametrize(("status", "code"), [(401, "invalid_delegation"), (503, "kill_switch")])
def test_a_line_outlasts_what_an_administrator_switches_off_and_on(status, code):
    body = json.dumps({"error": {"code": code}}).encode()
    answer = Answer(status, "id", body, {"x-should-retry": "false"})
    assert judge(answer, 9).verdict is Verdict.REFUSED


def test_a_request_that_is_nested_too_deep_to_be_sent_is_refused():
    nested = json.loads("[" * 400 + "]" * 400)
    with pytest.raises(LineError, match="cannot be sent") as error:
        request({"model": "tiny", "messages": nested})
    assert error.value.code == "invalid_body"


def test_an_answer_that_is_nested_deep_is_in_the_output_as_one_line():
    nested = b'{"a":\r\n' + b"[" * 400 + b"]" * 400 + b"\n}"
    kept = outcome.response(Answer(200, "id", nested, {}))
    text = objects.output_line("batch_1", Result(1, "one", LineState.DONE, kept))
    assert text.count(b"\n") == 1 and text.endswith(b"\n")
    assert json.loads(text)["response"]["body"] == json.loads(nested)


def test_what_is_no_json_is_no_answer():
    answer = Answer(200, "id", b"<html>", {})
    assert judge(answer, 0).verdict is Verdict.FAILED
    assert json.loads(outcome.response(answer))["body"]["error"]["code"] == "invalid_answer"
    for value in ("soon", "-1", "nan"):
        assert 0 <= judge(Answer(503, "id", b"", {"retry-after": value}), 0).delay <= 60
