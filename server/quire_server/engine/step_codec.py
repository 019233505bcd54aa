"""RankSteps and Echoes as bytes: a fixed header, then blocks of int32.

Columns of plain integers are encoded and decoded in one call each, and of rows that compute and sample one
token nothing is sent that says so: that is what keeps a step of 256 requests to some ten microseconds on
either side. Whatever is not a valid message is a CodecError: lengths, bounds and sums
are checked before anything is used. Pure: knows no sockets. The encoder and the decoders chain a digest over
all messages, which a rank echoes.
"""

from __future__ import annotations

import itertools
import operator
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.rank_step import (
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
from quire_server.engine.codec import CodecError, decoder, encode, unpack

VERSION = 7
MAX_STEP_BYTES = 64 << 20
MAX_ECHO_BYTES = 1 << 20
_HAS_COPIES, _ONLY_LARGEST = 1, 2
_HAS_OUTCOME, _DISK_FAILED = 1, 2
_NO_GRAPH = (0, 0)
_ITEM = 4  # bytes of an integer
# Integers of a started row: row, prompt tokens, prompt logprobs + 1, tokens, blocks, slot of its adapter + 1.
_STARTED = 6
_ORDERS, _REPORTS = decoder(tuple[AdapterOrder, ...]), decoder(tuple[AdapterReport, ...])


class _Lengths(NamedTuple):
    """The number of entries of each column, in the order of the columns."""

    rows: int  # two columns
    chunks: int  # two columns of the last rows; the rows before them compute and sample one token each
    sampled_steps: int
    sampled: int
    nan_rows: int
    new_blocks: int  # pairs
    drafted: int  # pairs (row, number of tokens)
    draft_tokens: int
    started: int
    started_tokens: int
    started_blocks: int
    spills: int  # pairs
    saves: int  # pairs
    loads: int  # pairs
    fetches: int  # pairs
    adapter_loads: int  # pairs
    orders: int  # bytes behind the columns, of msgpack: they are rare, and have texts

    @property
    def copies(self) -> int:
        """Blocks that are copied."""
        return self.spills + self.saves + self.loads + self.fetches

    @property
    def total(self) -> int:
        """Integers of all columns."""
        return (
            2 * (self.rows + self.chunks)
            + self.sampled_steps
            + self.sampled
            + self.nan_rows
            + 2 * (self.new_blocks + self.drafted + self.copies + self.adapter_loads)
            + self.draft_tokens
            + _STARTED * self.started
            + self.started_tokens
            + self.started_blocks
        )


# Version, flags, sequence, step id, shape of the recording, lengths.
_STEP_HEADER = struct.Struct(f"<BBIQ2I{len(_Lengths._fields)}I")
# Version, status, flags, sequence, digest, work, lengths of four columns, bytes of reports of adapters.
_ECHO_HEADER = struct.Struct("<BBBII2I5I")
_MOST = 0xFFFFFFFF
_STATUSES = frozenset(EchoStatus)


class StepEncoder:
    """The messages of rank 0, in order. The digest begins with the incarnation of the group, so that steps of
    another group are found.
    """

    def __init__(self, incarnation: str = "") -> None:
        self.sequence = 0  # of the last message
        self.digest = zlib.crc32(incarnation.encode())

    def encode(self, message: RankStep) -> bytes:
        """The bytes of the next message. Raises ValueError where it is larger than any step should be."""
        step, decodes = message.step, _leading_decodes(message.step)
        columns = [
            *(step.rows, step.starts, step.num_tokens[decodes:], step.samples[decodes:]),
            *(message.sampled_steps, message.sampled, message.nan_rows, _flat(step.new_blocks)),
            [value for row, tokens in step.drafts for value in (row, len(tokens))],
            _flat(tokens for _, tokens in step.drafts),
            [value for row in step.started for value in _started_fields(row)],
            *(row.token_ids for row in step.started),
            *(row.block_ids for row in step.started),
        ]
        copies, flags, copied = step.copies, _ONLY_LARGEST * message.only_largest, (0, 0, 0, 0)
        if copies is not None:
            flags |= _HAS_COPIES
            columns += map(_flat, _copy_columns(copies))
            copied = len(copies.spills), len(copies.saves), len(copies.loads), len(copies.fetches)
        columns.append(_flat(step.adapter_loads))
        orders = encode(message.adapter_orders) if message.adapter_orders else b""
        lengths = _Lengths(
            len(step.rows),
            len(step.rows) - decodes,
            len(message.sampled_steps),
            len(message.sampled),
            len(message.nan_rows),
            len(step.new_blocks),
            len(step.drafts),
            sum(len(tokens) for _, tokens in step.drafts),
            len(step.started),
            sum(len(row.token_ids) for row in step.started),
            sum(len(row.block_ids) for row in step.started),
            *copied,
            len(step.adapter_loads),
            len(orders),
        )
        self.sequence += 1
        numbers = (self.sequence & 0xFFFFFFFF, step.step_id, *(message.graph or _NO_GRAPH))
        header = _STEP_HEADER.pack(VERSION, flags, *numbers, *lengths)
        body = header + _packed(columns) + orders
        if len(body) > MAX_STEP_BYTES:
            raise ValueError(f"a step of {len(body)} bytes")
        self.digest = zlib.crc32(body, self.digest)
        return body


class StepDecoder:
    """Decodes the messages of rank 0, in order, on another rank."""

    def __init__(self, limits: RankLimits, incarnation: str = "") -> None:
        self._limits = limits
        self.sequence = 0  # of the last message
        self.digest = zlib.crc32(incarnation.encode())
        # Of the last message: most often the next one has the same rows.
        self._row_bytes, self._rows = b"", tuple[int, ...]()

    def decode(self, body: bytes) -> RankStep:
        """The next message; raises CodecError."""
        if not _STEP_HEADER.size <= len(body) <= MAX_STEP_BYTES:
            raise CodecError(f"a step of {len(body)} bytes")
        version, flags, sequence, step_id, sequences, tokens, *counts = _STEP_HEADER.unpack_from(body)
        lengths = _Lengths(*counts)
        if version != VERSION:
            raise CodecError(f"version {version} of the step protocol; this is version {VERSION}")
        if flags & ~(_HAS_COPIES | _ONLY_LARGEST):
            raise CodecError("unknown flags")
        if not flags & _HAS_COPIES and lengths.copies:
            raise CodecError("copies without their flag")
        if sequence != (self.sequence + 1) & 0xFFFFFFFF:
            raise CodecError(f"step {sequence} follows step {self.sequence}")
        end = _STEP_HEADER.size + _ITEM * lengths.total
        if len(body) != end + lengths.orders:
            raise CodecError(f"{len(body)} bytes, and the header describes another number")
        if (sequences == 0) != (tokens == 0):
            raise CodecError(f"a recording of {sequences} sequences of {tokens} tokens")
        graph = (sequences, tokens) if sequences else None
        values = np.frombuffer(
            body, "<u4", lengths.total, _STEP_HEADER.size
        )  # negative ones are beyond any bound
        columns = _Columns(tuple(values.tolist()), self._limits)
        rows = self._rows_of(columns, body[_STEP_HEADER.size : _STEP_HEADER.size + _ITEM * lengths.rows])
        message = columns.message(lengths, flags, step_id, rows, graph)
        if lengths.orders:
            message = replace(message, adapter_orders=_ORDERS(unpack(body[end:])))
        self.sequence, self.digest = sequence, zlib.crc32(body, self.digest)
        return message

    def _rows_of(self, columns: _Columns, encoded: bytes) -> tuple[int, ...]:
        length = len(encoded) // _ITEM
        if encoded == self._row_bytes:
            columns.skip(length)
            return self._rows
        rows = columns.take(length, self._limits.num_rows, "row")
        if len(set(rows)) != length:
            raise CodecError("a row occurs twice")
        self._row_bytes, self._rows = encoded, rows
        return rows


class _Columns:
    """Takes the columns of one message from the front, each within its bounds."""

    def __init__(self, values: tuple[int, ...], limits: RankLimits) -> None:
        self._values, self._limits = values, limits
        self._position = 0

    def take(self, length: int, bound: int, what: str) -> tuple[int, ...]:
        """The next column, whose values are below the bound."""
        if not length:
            return ()
        end = self._position + length
        column = self._values[self._position : end]
        self._position = end
        if (largest := max(column)) >= bound:
            raise CodecError(f"{what} {largest} is not below {bound}")
        return column

    def skip(self, length: int) -> None:
        """Leave out the next column, which has been checked."""
        self._position += length

    def pairs(self, length: int, first: int, second: int, what: str) -> tuple[tuple[int, int], ...]:
        """The next column of pairs, each with its own bound."""
        if not length:
            return ()
        column = self.take(2 * length, 1 << 31, what)
        if max(column[::2]) >= first or max(column[1::2]) >= second:
            raise CodecError(f"{what} out of bounds")
        return tuple(zip(column[::2], column[1::2], strict=True))

    def message(
        self, lengths: _Lengths, flags: int, step_id: int, rows: tuple[int, ...], graph: Shape | None
    ) -> RankStep:
        """The columns behind that of the rows, as a message."""
        limits, longest = self._limits, self._limits.max_model_len + 1
        if lengths.chunks > lengths.rows:
            raise CodecError("more rows with numbers of tokens than rows")
        starts = self.take(lengths.rows, limits.max_model_len, "position")
        decodes = (1,) * (lengths.rows - lengths.chunks)
        num_tokens = decodes + self.take(lengths.chunks, longest, "count")
        samples = decodes + self.take(lengths.chunks, longest, "count")
        sampled_steps = self.take(lengths.sampled_steps, 1 << 31, "sampled step")
        sampled = self.take(lengths.sampled, limits.vocab_size, "token")
        nan_rows = self.take(lengths.nan_rows, limits.num_rows, "row")
        new_blocks = self.pairs(lengths.new_blocks, limits.num_rows, limits.num_blocks, "new blocks")
        drafts = self._drafts(lengths) if lengths.drafted or lengths.draft_tokens else ()
        started: tuple[StartedRow, ...] = ()
        if lengths.started or lengths.started_tokens or lengths.started_blocks:
            started = self._started(lengths)
        copies = None
        if flags & _HAS_COPIES:
            blocks, host, disk = limits.num_blocks, limits.num_host_slots, limits.num_disk_slots
            copies = Copies(
                self.pairs(lengths.spills, host, disk, "spills"),
                self.pairs(lengths.saves, blocks, host, "saves"),
                self.pairs(lengths.loads, host, blocks, "loads"),
                self.pairs(lengths.fetches, disk, host, "fetches"),
            )
        loads = self.pairs(lengths.adapter_loads, limits.num_adapter_slots, 1 << 31, "adapter loads")
        step = Step(
            step_id, started, new_blocks, rows, starts, num_tokens, samples, drafts, (), copies, loads
        )
        if lengths.chunks:
            _check_chunks(step, lengths.chunks, limits)
        if drafts:
            _check_drafts(step, limits)
        return RankStep(step, sampled_steps, sampled, nan_rows, graph, bool(flags & _ONLY_LARGEST))

    def _drafts(self, lengths: _Lengths) -> tuple[tuple[int, tuple[int, ...]], ...]:
        limits = self._limits
        counts = self.pairs(lengths.drafted, limits.num_rows, limits.max_model_len, "drafts")
        if sum(count for _, count in counts) != lengths.draft_tokens:
            raise CodecError("the numbers of draft tokens do not add up")
        return tuple((row, self.take(count, limits.vocab_size, "token")) for row, count in counts)

    def _started(self, lengths: _Lengths) -> tuple[StartedRow, ...]:
        limits = self._limits
        fields = self.take(_STARTED * lengths.started, 1 << 31, "started row")
        each = list(zip(*[iter(fields)] * _STARTED, strict=True))
        if (
            sum(fields[3::_STARTED]) != lengths.started_tokens
            or sum(fields[4::_STARTED]) != lengths.started_blocks
            or max(fields[5::_STARTED], default=0) > self._limits.num_adapter_slots
        ):
            raise CodecError(
                "started rows whose tokens and blocks do not add up, or of an adapter's slot beyond all"
            )
        tokens = [self.take(one[3], limits.vocab_size, "token") for one in each]
        blocks = [self.take(one[4], limits.num_blocks, "block") for one in each]
        return tuple(map(self._started_row, each, tokens, blocks))

    def _started_row(
        self, fields: Sequence[int], tokens: tuple[int, ...], blocks: tuple[int, ...]
    ) -> StartedRow:
        row, num_prompt_tokens, prompt_logprobs, *_, slot = fields
        if row >= self._limits.num_rows or not 0 < num_prompt_tokens <= len(tokens):
            raise CodecError("a started row out of bounds")
        if len(tokens) > self._limits.max_model_len or not blocks:
            raise CodecError("a started row that is longer than the context, or without blocks")
        sampling = SamplingParams(1, prompt_logprobs=prompt_logprobs - 1 if prompt_logprobs else None)
        return StartedRow(row, "", tokens, num_prompt_tokens, blocks, sampling, 0, None, slot - 1)


def _check_chunks(step: Step, chunks: int, limits: RankLimits) -> None:
    """Check what is true of the last rows of any step, before which there are decodes."""
    decodes = len(step.rows) - chunks
    num_tokens = step.num_tokens[decodes:]
    ends = map(operator.add, step.starts[decodes:], num_tokens)
    if min(num_tokens) < 1 or max(ends) > limits.max_model_len:
        raise CodecError("a row computes no token, or tokens beyond the context")
    if any(map(operator.gt, step.samples[decodes:], num_tokens)):
        raise CodecError("a row samples more tokens than it computes")


def _check_drafts(step: Step, limits: RankLimits) -> None:
    starts = dict(zip(step.rows, step.starts, strict=True))
    for row, tokens in step.drafts:
        if starts.get(row, limits.max_model_len) + len(tokens) >= limits.max_model_len:
            raise CodecError("drafts of a row that is not computed, or beyond the context")


def _started_fields(row: StartedRow) -> tuple[int, ...]:
    wanted = row.sampling.prompt_logprobs
    prompt_logprobs = 0 if wanted is None else wanted + 1
    lengths = len(row.token_ids), len(row.block_ids)
    return row.row, row.num_prompt_tokens, prompt_logprobs, *lengths, row.adapter_slot + 1


def _leading_decodes(step: Step) -> int:
    """The number of rows at the beginning that compute and sample one token each."""
    ones = (1,) * len(step.rows)
    if step.num_tokens == ones == step.samples:
        return len(ones)
    pairs = zip(step.num_tokens, step.samples, strict=True)
    return next(index for index, pair in enumerate(pairs) if pair != (1, 1))


def _packed(columns: Iterable[Sequence[int]]) -> bytes:
    """Columns of integers as bytes."""
    return b"".join([struct.pack(f"<{len(column)}i", *column) for column in columns if column])


def _flat(groups: Iterable[Iterable[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(groups))


def _copy_columns(copies: Copies) -> tuple[tuple[tuple[int, int], ...], ...]:
    return copies.spills, copies.saves, copies.loads, copies.fetches


def encode_echo(echo: Echo) -> bytes:
    """The bytes of an echo."""
    flags, copied = 0, echo.copied or CopyOutcome()
    if echo.copied is not None:
        flags = _HAS_OUTCOME | (_DISK_FAILED if copied.disk_failed else 0)
    columns = (copied.failed, copied.arrived, copied.missed, copied.lost)
    reports = encode(echo.adapters) if echo.adapters else b""
    header = _ECHO_HEADER.pack(
        VERSION,
        echo.status,
        flags,
        echo.sequence & _MOST,
        echo.digest,
        *(min(value, _MOST) for value in echo.work),
        *map(len, columns),
        len(reports),
    )
    return header + _packed(columns) + reports


def decode_echo(body: bytes) -> Echo:
    """The echo of these bytes; raises CodecError."""
    if not _ECHO_HEADER.size <= len(body) <= MAX_ECHO_BYTES:
        raise CodecError(f"an echo of {len(body)} bytes")
    version, status, flags, sequence, digest, *work, a, b, c, d, size = _ECHO_HEADER.unpack_from(body)
    lengths = a, b, c, d
    if version != VERSION:
        raise CodecError(f"version {version} of the step protocol; this is version {VERSION}")
    end = _ECHO_HEADER.size + _ITEM * sum(lengths)
    if len(body) != end + size:
        raise CodecError(f"{len(body)} bytes, and the header describes another number")
    if status not in _STATUSES:
        raise CodecError(f"status {status} of an echo")
    if flags not in (0, _HAS_OUTCOME, _HAS_OUTCOME | _DISK_FAILED) or (sum(lengths) and not flags):
        raise CodecError("unknown flags of an echo")
    copied = None
    if flags:
        values = iter(np.frombuffer(body, "<i4", sum(lengths), _ECHO_HEADER.size).tolist())
        failed, arrived, missed, lost = (tuple(itertools.islice(values, length)) for length in lengths)
        copied = CopyOutcome(failed, arrived, missed, lost, bool(flags & _DISK_FAILED))
    reports = _REPORTS(unpack(body[end:])) if size else ()
    return Echo(sequence, digest, EchoStatus(status), copied, Work(*work), reports)
