"""The bytes of streamed responses. Most chunks are built from parts that are encoded once per stream."""

import json

import pytest

from quire_http.exchange import HttpExchange
from quire_server.api.output_processor import OutputDelta
from quire_server.api.request_context import TokenCounts
from quire_server.api.response_formatter import ChatFormatter, CompletionFormatter, Header, StreamedResponse
from quire_server.core.step import TokenLogprobs

# A model's name may contain anything, even the placeholder of the text in an encoded chunk.
HEADER = Header("cmpl-1", 1, r'name "\u0000"')
TEXTS = ["plain", 'a "quote" and a \\', "line\nand\ttab", "zwölf 漢字 🙂", "\0", "\u2028", " "]


class ByteTokenizer:
    """A tokenizer whose token n is the byte n."""

    def token_bytes(self, token_id):
        return bytes([token_id])


async def streamed_chunks(formatter, deltas, num_answers=1, *, include_usage=False, counting=(), **more):
    """The JSON of each event except the last, which is [DONE]."""
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    exchange = HttpExchange({"headers": [], "path": "/v1/completions"}, None, send)
    delivery = StreamedResponse(
        exchange,
        TokenCounts(),
        formatter,
        num_answers,
        include_usage=include_usage,
        counting=counting,
        **more,
    )
    for delta in deltas:
        await delivery.add(delta)
    await delivery.finish(prompt_tokens=3)
    events = b"".join(sent).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def delta(text, index=0, logprobs=(), finish_reason=None):
    return OutputDelta(index, text, logprobs, 1, 0, finish_reason)


def make_formatters(*, with_logprobs):
    leads = ("", "")
    return [
        ChatFormatter(HEADER, ByteTokenizer(), with_logprobs, False),
        CompletionFormatter(HEADER, ByteTokenizer(), with_logprobs=with_logprobs, leads=leads),
    ]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_every_text_chunk_equals_the_formatter_s_own_delta(include_usage, with_logprobs):
    for formatter in make_formatters(with_logprobs=with_logprobs):
        deltas = [delta(text, number % 2) for number, text in enumerate(TEXTS)]
        chunks = await streamed_chunks(formatter, deltas, 2, include_usage=include_usage)
        body = formatter.envelope(chunk=True)
        usage = {"usage": None} if include_usage else {}
        expected = [{**body, "choices": [formatter.delta(p, [])], **usage} for p in deltas]
        assert [chunk for chunk in chunks if chunk in expected] == expected
        assert len(chunks) - len(expected) == 2 * isinstance(formatter, ChatFormatter) + include_usage


async def test_logprobs_are_sent_with_the_text_of_their_tokens():
    one = TokenLogprobs(0xE4, -1.0, ())
    deltas = [delta("a"), delta("", logprobs=(one,)), delta("ä", logprobs=(one,)), delta("b")]
    for formatter in make_formatters(with_logprobs=True):
        chunks = await streamed_chunks(formatter, [*deltas, delta("", finish_reason="stop")])
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        lengths = [len(each.get("content", each.get("tokens"))) for each in found if each]
        assert lengths == [0, 2, 0]


async def test_continuous_usage_of_an_answer_that_goes_on_counts_what_it_has_already():
    for formatter in make_formatters(with_logprobs=False):
        chunks = await streamed_chunks(
            formatter, [delta("a")], 0, include_usage=True, counting=[3], num_resumed=7
        )
        assert chunks[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_continuous_usage_counts_each_answer_and_the_last_chunk_counts_all(with_logprobs):
    deltas = [delta("a"), delta("b", 1), delta("c"), delta("d", 1, finish_reason="stop")]
    deltas.append(delta("", finish_reason="length"))
    for formatter in make_formatters(with_logprobs=with_logprobs):
        *chunks, last = await streamed_chunks(formatter, deltas, 2, include_usage=True, counting=[3, 4])
        usages = {0: [], 1: []}
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            usages[chunk["choices"][0]["index"]].append((usage["prompt_tokens"], usage["completion_tokens"]))
        opening = int(isinstance(formatter, ChatFormatter))
        assert usages[0] == [(3, 0)] * opening + [(3, 1), (3, 2), (3, 3)]
        assert usages[1] == [(4, 0)] * opening + [(4, 1), (4, 2), (4, 2)]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
