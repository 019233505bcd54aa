"""A runner without tensors whose KV caches are lists of lists of token ids: what attention would read is
visible, in every tier.
"""

import random
import zlib
from collections.abc import Iterable

from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import Copies, CopyOutcome, StartedRow, Step, StepResult, TokenEvent

VOCAB_SIZE = 50
EOS = VOCAB_SIZE

Block = list[int | None]


def next_token(tokens: Iterable[int]) -> int:
    """The model: a token that depends on every token before it."""
    return zlib.crc32(bytes(str(list(tokens)), "ascii")) % VOCAB_SIZE


def answer(prompt: Iterable[int], length: int) -> list[int]:
    """The model's answer to a prompt, by definition."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(tokens) - length :]


class FakeDisk:
    """Moves blocks between host and disk in order, each some steps late; faults are switched on by a test."""

    def __init__(self, num_slots: int) -> None:
        self.blocks: list[Block | None] = [None] * num_slots
        self.lag = 0  # steps that a transfer takes
        self.full = False  # writes are dropped
        self.broken = False
        self._told = False
        self._queue: list[tuple[int, int, int, Block | None]] = []  # due, disk slot, host slot or -1, block

    def submit(self, copies: Copies, host: list[Block], step_id: int) -> list[int]:
        """Returns the disk slots whose write was dropped."""
        lost = []
        for source, target in copies.spills:
            if self.full:
                self.blocks[target] = None
                lost.append(target)
            else:
                self._queue.append((step_id + self.lag, target, -1, list(host[source])))
        self._queue += [(step_id + self.lag, source, target, None) for source, target in copies.fetches]
        return lost

    def collect(self, host: list[Block], step_id: int) -> CopyOutcome:
        """The copies that were finished since the last step."""
        arrived, missed = [], []
        while self._queue and (self.broken or self._queue[0][0] <= step_id):
            _, slot, target, block = self._queue.pop(0)
            if target < 0:
                self.blocks[slot] = block
            elif self.broken or self.blocks[slot] is None:
                missed.append(target)
            else:
                host[target] = list(self.blocks[slot] or ())
                arrived.append(target)
        is_news, self._told = self.broken and not self._told, self.broken
        return CopyOutcome((), tuple(arrived), tuple(missed), (), is_news)


class FakeRunner:
    """Writes each computed token to its block, and samples from what the row's block table then holds."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv: list[Block] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.host: list[Block] = [[None] * config.block_size for _ in range(config.num_host_slots)]
        self.disk = FakeDisk(config.num_disk_slots)
        self.corrupt_loads = False  # checksums of blocks from the host are wrong
        self.accuracy = 0.7  # of each token that the draft model says
        self._chance = random.Random(0)
        self.rows: dict[int, StartedRow] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def run(self, step: Step) -> StepResult:
        outcome = self._copy(step)
        for started in step.started:
            self.rows[started.row] = started
            self.tokens[started.row] = list(started.token_ids)
            self.tables[started.row] = list(started.block_ids)
        for row, block_id in step.new_blocks:
            self.tables[row].append(block_id)
        assert all(step.num_tokens)
        is_alone = self.config.pools and len(step.rows) == 1
        assert is_alone or step.total_tokens <= self.config.token_budget
        wholly = [n == samples for n, samples in zip(step.num_tokens, step.samples, strict=True)]
        assert wholly == sorted(wholly, reverse=True), "rows that sample at every token come first"
        wished = {row: self._draft(row, count) for row, count in step.draft_requests}
        drafts = {**dict(step.drafts), **wished}
        spans = []
        # Every row writes before any row reads, as on a device: a block shared too early shows.
        for row, start, n, samples in zip(step.rows, step.starts, step.num_tokens, step.samples, strict=True):
            mine = drafts.get(row, ())
            end = start + (1 + len(mine) if row in wished else n)
            assert row not in drafts or (samples == n and start + 1 == len(self.tokens[row]))
            written = self.tokens[row] + list(mine)
            for position in range(start, end):
                block = self.tables[row][position // self.config.block_size]
                self.kv[block][position % self.config.block_size] = written[position]
            spans.append((row, end, 1 + len(mine) if samples else 0, written))
        sampled: list[int] = []
        for row, end, count, written in spans:
            new = [self._sample(row, written[: end - count + 1 + i], outcome) for i in range(count)]
            sampled += new
            for index, token in enumerate(new):
                self.tokens[row].append(token)
                if index + 1 == count or written[end - count + 1 + index] != token:
                    break
        return StepResult(
            step.step_id, tuple(sampled), copied=outcome, drafts=tuple((row, d) for row, d in wished.items())
        )

    def _sample(self, row: int, tokens: list[int], outcome: CopyOutcome) -> int:
        held = [slot for block in self.tables[row] for slot in self.kv[block]][: len(tokens)]
        is_void = not set(outcome.failed).isdisjoint(self.tables[row])
        assert is_void or held == tokens, "the blocks hold something else than the tokens"
        return next_token(token for token in held if token is not None)

    def _draft(self, row: int, count: int) -> tuple[int, ...]:
        """Drafts of a draft model: a random number of tokens, each right with a given probability."""
        tokens = list(self.tokens[row])
        for _ in range(self._chance.randint(0, count)):
            is_right = self._chance.random() < self.accuracy
            tokens.append(next_token(tokens) if is_right else self._chance.randrange(VOCAB_SIZE))
        return tuple(tokens[len(self.tokens[row]) :])

    def _copy(self, step: Step) -> CopyOutcome:
        copies = step.copies or Copies((), (), (), ())
        lost = self.disk.submit(copies, self.host, step.step_id)
        for block, slot in copies.saves:
            self.host[slot] = list(self.kv[block])
        for slot, block in copies.loads:
            self.kv[block] = [-1] * self.config.block_size if self.corrupt_loads else list(self.host[slot])
        failed = tuple(block for _, block in copies.loads) if self.corrupt_loads else ()
        background = self.disk.collect(self.host, step.step_id)
        return CopyOutcome(failed, background.arrived, background.missed, tuple(lost), background.disk_failed)


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_blocks": 32,
        "block_size": 4,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]  # a dict of mixed values


def request(
    name: str, prompt: Iterable[int], max_tokens: int = 4, arrival: float = 0.0, **more: object
) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens), arrival, **more)  # type: ignore[arg-type]  # as above


def drain(
    scheduler: Scheduler, runner: FakeRunner, max_steps: int = 10_000
) -> tuple[dict[str, list[int]], dict[str, TokenEvent]]:
    """Run to the end: (tokens by request, last event by request)."""
    tokens: dict[str, list[int]] = {}
    last: dict[str, TokenEvent] = {}
    for _ in range(max_steps):
        step = scheduler.schedule()
        if step is None:
            return tokens, last
        for event in scheduler.commit(step, runner.run(step)):
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            last[event.request_id] = event
        scheduler.check()
    raise AssertionError("no end in sight")


def is_error(event: TokenEvent) -> bool:
    return event.finish_reason is FinishReason.ERROR and bool(event.error)
