"""Response bodies in the cases where JSON or OpenAI's format has special rules."""

import json
import math

from quire_server.api.output_processor import OutputDelta
from quire_server.api.response_formatter import Answer, ChatFormatter, CompletionFormatter, Header
from quire_server.core.step import TokenLogprobs

HEADER = Header("id", 1, "m")


class ByteTokenizer:
    """A tokenizer whose token n is the byte n."""

    def token_bytes(self, token_id):
        return bytes([token_id])


def answer_with(*logprobs):
    made = Answer()
    made.add(OutputDelta(0, "x", logprobs, 1, 0, "stop"))
    return made


def test_an_impossible_token_has_a_finite_logprob():
    one = TokenLogprobs(97, -math.inf, ((98, -math.inf),))
    formatters = (
        ChatFormatter(HEADER, ByteTokenizer(), True),
        CompletionFormatter(HEADER, ByteTokenizer(), with_logprobs=True, leads=("",)),
    )
    for formatter in formatters:
        body = formatter.choice(0, answer_with(one))
        assert "-9999.0" in json.dumps(body, allow_nan=False)


def test_a_token_that_is_a_part_of_a_character_is_shown_with_its_bytes():
    formatter = ChatFormatter(HEADER, ByteTokenizer(), True)
    (token,) = formatter.choice(0, answer_with(TokenLogprobs(0xE4, -1.0, ())))["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("\ufffd", [0xE4])


def test_without_logprobs_the_field_is_null_everywhere():
    formatter = ChatFormatter(HEADER, ByteTokenizer(), False)
    choices = [
        *formatter.opening(0),
        formatter.delta(OutputDelta(0, "x", (), 0, 0, None), []),
        formatter.closing(0, "stop"),
        formatter.choice(0, answer_with()),
    ]
    assert [choice["logprobs"] for choice in choices] == [None] * 4
