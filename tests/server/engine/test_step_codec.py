"""Steps that rank 0 sends to other ranks arrive unchanged, and hostile bytes are refused."""

import contextlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core.rank_step import (
    STEP_MASK,
    AdapterOrder,
    AdapterReport,
    Echo,
    EchoStatus,
    RankLimits,
    RankStep,
    Work,
)
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import Copies, CopyOutcome, StartedRow, Step
from quire_server.engine.codec import CodecError
from quire_server.engine.step_codec import StepDecoder, StepEncoder, decode_echo, encode_echo
from tests.examples import examples

LIMITS = RankLimits(
    num_rows=300,
    num_blocks=500,
    num_host_slots=40,
    num_disk_slots=70,
    max_model_len=1000,
    vocab_size=2000,
    num_adapter_slots=3,
)

tokens = st.lists(st.integers(0, 1999), min_size=1, max_size=9).map(tuple)
blocks = st.lists(st.integers(0, 499), min_size=1, max_size=5).map(tuple)
row_ids = st.integers(0, 299)


def pairs_below(first, second):
    return st.lists(st.tuples(st.integers(0, first - 1), st.integers(0, second - 1)), max_size=3).map(tuple)


@st.composite
def steps(draw):
    rows = draw(st.lists(row_ids, max_size=6, unique=True).map(tuple))
    starts = tuple(draw(st.integers(0, 900)) for _ in rows)
    num_tokens = tuple(draw(st.integers(1, 90)) for _ in rows)
    started = tuple(
        StartedRow(
            draw(row_ids),
            "",
            given_tokens := draw(tokens),
            draw(st.integers(1, len(given_tokens))),
            draw(blocks),
            SamplingParams(1, prompt_logprobs=draw(st.none() | st.integers(0, 20))),
            0,
            None,
            draw(st.integers(-1, 2)),
        )
        for _ in range(draw(st.integers(0, 3)))
    )
    copies = st.builds(
        Copies, pairs_below(40, 70), pairs_below(500, 40), pairs_below(40, 500), pairs_below(70, 40)
    )
    step = Step(
        draw(st.integers(0, 2**63)),
        started,
        draw(st.lists(st.tuples(row_ids, st.integers(0, 499)), max_size=4).map(tuple)),
        rows,
        starts,
        num_tokens,
        tuple(draw(st.integers(0, count)) for count in num_tokens),
        tuple((row, draw(tokens)) for row in rows if draw(st.booleans())),
        (),
        draw(st.none() | copies),
        draw(pairs_below(3, 2**31)),
    )
    nan_rows = draw(st.lists(row_ids, max_size=3).map(tuple))
    steps = tuple(draw(st.lists(st.integers(0, STEP_MASK), max_size=3)))
    size = st.integers(1, 2**32 - 1)
    graph = draw(st.none() | st.tuples(size, size))
    texts = st.text(max_size=9)
    orders = draw(
        st.lists(st.builds(AdapterOrder, st.integers(1, 2**31), texts, st.integers(0, 9)), max_size=2).map(
            tuple
        )
    )
    return RankStep(step, steps, draw(st.just(()) | tokens), nan_rows, graph, draw(st.booleans()), orders)


@given(st.lists(steps(), min_size=1, max_size=4))
def test_steps_arrive_unchanged_and_both_sides_have_the_same_digest(messages):
    encoder, decoder = StepEncoder(), StepDecoder(LIMITS)
    for message in messages:
        assert decoder.decode(encoder.encode(message)) == message
        assert (decoder.sequence, decoder.digest) == (encoder.sequence, encoder.digest)


def test_what_only_rank_0_needs_stays_there():
    row = StartedRow(1, "chatcmpl-1", (5, 6), 2, (3,), SamplingParams(9, seed=4, prompt_logprobs=2), 77)
    step = Step(1, (row,), (), (1,), (0,), (2,), (1,))
    (arrived,) = StepDecoder(LIMITS).decode(StepEncoder().encode(RankStep(step))).step.started
    assert arrived == replace(row, request_id="", seed=0, sampling=SamplingParams(1, prompt_logprobs=2))


numbers = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)


@given(
    st.builds(
        Echo,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.sampled_from(EchoStatus),
        st.none() | st.builds(CopyOutcome, numbers, numbers, numbers, numbers, st.booleans()),
        st.builds(Work, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        st.lists(st.builds(AdapterReport, st.integers(1, 2**31), st.text(), st.text()), max_size=2).map(
            tuple
        ),
    )
)
def test_echoes_arrive_unchanged(echo):
    assert decode_echo(encode_echo(echo)) == echo


@settings(max_examples=examples(150))
@given(st.binary(max_size=200))
def test_random_bytes_are_a_codec_error(data):
    with pytest.raises(CodecError):
        StepDecoder(LIMITS).decode(data)
    with contextlib.suppress(CodecError):
        decode_echo(data)


@settings(max_examples=examples(150))
@given(steps(), st.data())
def test_a_damaged_step_is_a_codec_error_or_within_the_limits(message, data):
    body = bytearray(StepEncoder().encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[len(body) - data.draw(st.integers(0, 5)) :]
    try:
        arrived = StepDecoder(LIMITS).decode(bytes(body))
    except CodecError:
        return
    step = arrived.step
    assert all(row < LIMITS.num_rows for row in (*step.rows, *arrived.nan_rows))
    assert all(token < LIMITS.vocab_size for token in arrived.sampled)
    ends = [start + count for start, count in zip(step.starts, step.num_tokens, strict=True)]
    assert max(ends, default=0) <= LIMITS.max_model_len
    for row in step.started:
        assert row.block_ids and max(row.block_ids) < LIMITS.num_blocks
        assert max(row.token_ids) < LIMITS.vocab_size
        assert -1 <= row.adapter_slot < LIMITS.num_adapter_slots
    assert all(slot < LIMITS.num_adapter_slots for slot, _ in step.adapter_loads)


def test_a_step_that_is_lost_or_repeated_is_noticed():
    encoder = StepEncoder()
    first, second, third = (
        encoder.encode(RankStep(Step(number, (), (), (), (), (), ()))) for number in range(3)
    )
    decoder = StepDecoder(LIMITS)
    decoder.decode(first)
    for wrong in (first, third):
        with pytest.raises(CodecError, match="follows step 1"):
            decoder.decode(wrong)
    decoder.decode(second)
    with pytest.raises(CodecError, match="version 9 of the step protocol"):
        decoder.decode(b"\x09" + third[1:])


def test_a_decode_step_takes_at_most_24_bytes_per_running_request():
    rows = tuple(range(256))
    ones, starts = (1,) * 256, (700,) * 256
    new_blocks = tuple((row, row) for row in rows[::16])  # every 16th token begins a block
    message = RankStep(
        Step(1, (), new_blocks, rows, starts, ones, ones), sampled_steps=(7,), sampled=(1500,) * 256
    )
    body = StepEncoder().encode(message)
    assert len(body) <= 24 * 256
    assert StepDecoder(LIMITS).decode(body) == message


def test_a_step_of_decodes_and_a_chunk_arrives_unchanged_whichever_comes_first():
    for num_tokens, samples in (((1, 1, 5), (1, 1, 0)), ((5, 1, 1), (1, 1, 1)), ((1, 1, 1), (1, 0, 1))):
        message = RankStep(Step(1, (), (), (3, 4, 5), (8, 9, 10), num_tokens, samples))
        assert StepDecoder(LIMITS).decode(StepEncoder().encode(message)) == message


def test_rows_that_say_they_are_no_decodes_are_not_more_than_all_rows():
    message = RankStep(Step(1, (), (), (1,), (0,), (2,), (1,)))
    body = bytearray(StepEncoder().encode(message))
    assert StepDecoder(LIMITS).decode(bytes(body)) == message
    rows = struct.calcsize("<BBIQ2I")
    assert struct.unpack_from("<2I", body, rows) == (1, 1)
    struct.pack_into("<2I", body, rows, 0, 2)
    with pytest.raises(CodecError, match="more rows with numbers of tokens than rows"):
        StepDecoder(LIMITS).decode(bytes(body))
