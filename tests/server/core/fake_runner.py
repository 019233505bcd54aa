"""A runner without tensors whose KV caches are lists of lists of token ids: what attention would read is
visible, in every tier.
"""

import zlib
from collections.abc import Iterable

from quire_server.core.request import FinishReason, Request, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import Copies, CopyOutcome, StartedRow, Step, StepResult, TokenEvent

VOCAB_SIZE = 50
EOS = VOCAB_SIZE

Block = list[int | None]


def next_token(tokens: Iterable[int]) -> int:
    """The model: a token that depends on every token before it."""
    return zlib.crc32(bytes(str(list(tokens)), "ascii")) % VOCAB_SIZE


def answer(prompt: Iterable[int], length: int) -> list[int]:
    """What the model says, by definition."""
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
        """What was done since the last step."""
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
        self.rows: dict[int, StartedRow] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def run(self, step: Step) -> StepResult:
        outcome = self._copy(step)
        for started in step.started:
            self.rows[started.row] = started
            self.tokens[started.row] = list(started.token_ids)
            self.tables[started.row] = list(started.block_ids)
        for row, block_id in step.grown:
            self.tables[row].append(block_id)
        assert all(step.num_tokens)
        assert step.total_tokens <= self.config.token_budget
        decodes = [n == 1 and samples for n, samples in zip(step.num_tokens, step.samples, strict=True)]
        assert decodes == sorted(decodes, reverse=True), "decodes first"
        sampled = []
        # Every row writes before any row reads, as on a device: a block shared too early shows.
        for row, start, n in zip(step.rows, step.starts, step.num_tokens, strict=True):
            for position in range(start, start + n):
                block = self.tables[row][position // self.config.block_size]
                self.kv[block][position % self.config.block_size] = self.tokens[row][position]
        for row, start, n, samples in zip(step.rows, step.starts, step.num_tokens, step.samples, strict=True):
            if samples:
                context = [slot for block in self.tables[row] for slot in self.kv[block]][: start + n]
                is_void = not set(outcome.failed).isdisjoint(self.tables[row])
                assert is_void or context == self.tokens[row], (
                    "the blocks hold something else than the tokens"
                )
                sampled.append(next_token(t for t in context if t is not None))
                self.tokens[row].append(sampled[-1])
        return StepResult(step.step_id, tuple(sampled), copied=outcome)

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
