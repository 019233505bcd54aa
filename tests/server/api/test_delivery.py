"""What a stream sends, byte by byte: most chunks are put together from parts that were encoded beforehand."""

import json

import pytest

from quire_server.api.delivery import Streamed
from quire_server.api.generation import Piece
from quire_server.api.reply import Reply
from quire_server.api.shapes import ChatShape, CompletionShape, Header
from quire_server.core.step import TokenLogprobs

# A model may be called anything, even what stands for the text in an encoded chunk.
HEADER = Header("cmpl-1", 1, r'name "\u0000"')
TEXTS = ["plain", 'a "quote" and a \\', "line\nand\ttab", "zwölf 漢字 🙂", "\0", "\u2028", " "]


class Bytes:
    """A tokenizer whose token n is the byte n."""

    def token_bytes(self, token_id):
        return bytes([token_id])


async def streamed(shape, pieces, num_answers=1, *, include_usage=False, counting=()):
    """The JSON of each event but the last, which says that it is done."""
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    reply = Reply({"headers": []}, None, send)
    delivery = Streamed(reply, shape, num_answers, include_usage=include_usage, counting=counting)
    for piece in pieces:
        await delivery.add(piece)
    await delivery.finish(prompt_tokens=3)
    events = b"".join(sent).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def piece(text, index=0, logprobs=(), finish_reason=None):
    return Piece(index, text, logprobs, 1, 0, finish_reason)


def shapes(*, with_logprobs):
    leads = ("", "")
    return [
        ChatShape(HEADER, Bytes(), with_logprobs, False),
        CompletionShape(HEADER, Bytes(), with_logprobs=with_logprobs, leads=leads),
    ]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_every_chunk_of_text_is_the_shape_s_own(include_usage, with_logprobs):
    for shape in shapes(with_logprobs=with_logprobs):
        pieces = [piece(text, number % 2) for number, text in enumerate(TEXTS)]
        chunks = await streamed(shape, pieces, 2, include_usage=include_usage)
        body = shape.envelope(chunk=True)
        usage = {"usage": None} if include_usage else {}
        expected = [{**body, "choices": [shape.delta(p.answer, p.text, [])], **usage} for p in pieces]
        assert [chunk for chunk in chunks if chunk in expected] == expected
        assert len(chunks) - len(expected) == 2 * isinstance(shape, ChatShape) + include_usage


async def test_logprobs_come_with_the_text_of_their_tokens():
    one = TokenLogprobs(0xE4, -1.0, ())
    pieces = [piece("a"), piece("", logprobs=(one,)), piece("ä", logprobs=(one,)), piece("b")]
    for shape in shapes(with_logprobs=True):
        chunks = await streamed(shape, [*pieces, piece("", finish_reason="stop")])
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        lengths = [len(each.get("content", each.get("tokens"))) for each in found if each]
        assert lengths == [0, 2, 0]


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_continuous_usage_is_each_answer_s_own_so_far_and_the_last_chunk_s_is_of_all(with_logprobs):
    pieces = [piece("a"), piece("b", 1), piece("c"), piece("d", 1, finish_reason="stop")]
    pieces.append(piece("", finish_reason="length"))
    for shape in shapes(with_logprobs=with_logprobs):
        *chunks, last = await streamed(shape, pieces, 2, include_usage=True, counting=[3, 4])
        told = {0: [], 1: []}
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            told[chunk["choices"][0]["index"]].append((usage["prompt_tokens"], usage["completion_tokens"]))
        opening = int(isinstance(shape, ChatShape))
        assert told[0] == [(3, 0)] * opening + [(3, 1), (3, 2), (3, 3)]
        assert told[1] == [(4, 0)] * opening + [(4, 1), (4, 2), (4, 2)]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
