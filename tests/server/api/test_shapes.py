"""Shapes of responses where JSON and OpenAI are particular."""

import json
import math

from quire_server.api.generation import Piece
from quire_server.api.shapes import Answer, ChatShape, CompletionShape, Header
from quire_server.core.step import TokenLogprobs

HEADER = Header("id", 1, "m")


class Letters:
    """A tokenizer whose token n is the byte n."""

    def token_bytes(self, token_id):
        return bytes([token_id])


def answer(*logprobs):
    made = Answer()
    made.add(Piece(0, "x", logprobs, 1, 0, "stop"))
    return made


def test_a_token_that_cannot_come_has_a_finite_logprob():
    one = TokenLogprobs(97, -math.inf, ((98, -math.inf),))
    shapes = (
        ChatShape(HEADER, Letters(), True),
        CompletionShape(HEADER, Letters(), with_logprobs=True, leads=("",)),
    )
    for shape in shapes:
        body = shape.choice(0, answer(one))
        assert "-9999.0" in json.dumps(body, allow_nan=False)


def test_half_a_character_is_shown_with_its_bytes():
    shape = ChatShape(HEADER, Letters(), True)
    (token,) = shape.choice(0, answer(TokenLogprobs(0xE4, -1.0, ())))["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("\ufffd", [0xE4])


def test_without_logprobs_the_field_is_null_everywhere():
    shape = ChatShape(HEADER, Letters(), False)
    choices = [
        *shape.opening(0),
        shape.delta(0, "x", []),
        shape.closing(0, "stop"),
        shape.choice(0, answer()),
    ]
    assert [choice["logprobs"] for choice in choices] == [None] * 4
