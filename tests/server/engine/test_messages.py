"""The wire format: messages arrive unchanged, and invalid ones are refused."""

import contextlib
import dataclasses

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.core.stats import EngineStats, Timing
from quire_server.core.step import TokenEvent, TokenLogprobs
from quire_server.engine.codec import CodecError
from quire_server.engine.messages import EngineInfo, EngineInputs, EngineOutputs, FrameReader, to_frame
from tests.examples import examples

tokens = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 100),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 9)), max_size=2).map(tuple),
    bad_words=st.lists(tokens, max_size=2).map(tuple),
    watermark=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request, st.text(max_size=9), tokens, sampling, arrival=st.floats(0, 1e9), priority=st.just(0)
)
logprobs = st.builds(
    TokenLogprobs,
    st.integers(0, 9),
    st.floats(-99, 0),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0))).map(tuple),
)
seconds = st.floats(0, 1e9)
timings = st.builds(Timing, seconds, seconds, seconds, seconds, st.integers(0, 9))
events = st.builds(
    TokenEvent,
    st.text(max_size=9),
    tokens,
    st.none() | st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.text(max_size=9),
    st.integers(0, 9),
    st.lists(logprobs, max_size=2).map(tuple),
    st.none() | timings,
)
messages = st.one_of(
    st.builds(
        EngineInputs,
        st.lists(requests, max_size=3).map(tuple),
        st.lists(st.text(max_size=9), max_size=3).map(tuple),
    ),
    st.builds(
        EngineOutputs,
        st.lists(events, max_size=3).map(tuple),
        st.just(EngineStats(running=2, kv_utilization=0.5)),
        st.lists(st.text(max_size=9), max_size=3).map(tuple),
        tokens,
        st.integers(0, 9),
    ),
    st.just(EngineInfo(1, 2, 3, 4, 5, (("weights", 6), ("kv", 7)))),
)


@given(st.lists(messages, max_size=4), st.integers(1, 40))
@settings(max_examples=examples(150), deadline=None)
def test_messages_arrive_unchanged_at_any_chunk_size(sent, size):
    stream = b"".join(map(to_frame, sent))
    reader = FrameReader()
    received = [m for start in range(0, len(stream), size) for m in reader.feed(stream[start : start + size])]
    assert received == sent


@given(st.binary(max_size=200))
@settings(max_examples=examples(300), deadline=None)
def test_random_bytes_are_refused_or_an_incomplete_frame(data):
    with contextlib.suppress(CodecError):
        FrameReader().feed(data)


def frame(value):
    body = msgpack.packb(value)
    return len(body).to_bytes(4, "big") + body


ASKED = SamplingParams(16, grammar=Grammar(GrammarKind.REGEX, "a"))
GOOD = msgpack.unpackb(to_frame(EngineInputs((Request("r", (1, 2), ASKED, 0.0),)))[4:])
IGNORE_EOS = [field.name for field in dataclasses.fields(SamplingParams)].index("ignore_eos")
GRAMMAR = [field.name for field in dataclasses.fields(SamplingParams)].index("grammar")


def changed_frame(change):
    value = msgpack.unpackb(msgpack.packb(GOOD))
    change(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"tag": 2},
        [],
        [9, []],
        [True, []],
        [2, [[]]],
        changed_frame(lambda v: v[1][0][0].append(1)),
        changed_frame(lambda v: v[1][0][0].__setitem__(0, 5)),
        changed_frame(lambda v: v[1][0][0].__setitem__(0, b"r")),
        changed_frame(lambda v: v[1][0][0].__setitem__(1, [1, True])),
        changed_frame(lambda v: v[1][0][0].__setitem__(1, [1, "2"])),
        changed_frame(lambda v: v[1][0][0][2].__setitem__(0, 1.5)),
        changed_frame(lambda v: v[1][0][0][2].__setitem__(IGNORE_EOS, 0)),
        changed_frame(lambda v: v[1][0][0][2].__setitem__(GRAMMAR, ["xml", "a"])),
        changed_frame(lambda v: v[1][0][0][2].__setitem__(GRAMMAR, ["regex", b"a"])),
    ],
)
def test_a_message_of_the_wrong_shape_is_refused(value):
    assert FrameReader().feed(frame(GOOD))
    with pytest.raises(CodecError):
        FrameReader().feed(frame(value))


def test_a_frame_with_a_length_over_the_limit_is_refused_at_once():
    with pytest.raises(CodecError, match="longer"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_a_deeply_nested_frame_is_refused():
    body = b"\x91" * 100_000 + b"\x00"
    with pytest.raises(CodecError):
        FrameReader().feed(len(body).to_bytes(4, "big") + body)
