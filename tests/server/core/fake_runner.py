"""A runner without tensors whose KV cache is a list of lists of token ids: what attention would read is
visible.
"""

import zlib
from collections.abc import Iterable

from quire_server.core.request import FinishReason, Request, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StartedRow, Step, StepResult, TokenEvent

VOCAB_SIZE = 50
EOS = VOCAB_SIZE


def next_token(tokens: Iterable[int]) -> int:
    """The model: a token that depends on every token before it."""
    return zlib.crc32(bytes(str(list(tokens)), "ascii")) % VOCAB_SIZE


def answer(prompt: Iterable[int], length: int) -> list[int]:
    """What the model says, by definition."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(tokens) - length :]


class FakeRunner:
    """Writes each computed token to its block, and samples from what the row's block table then holds."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.rows: dict[int, StartedRow] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def run(self, step: Step) -> StepResult:
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
                assert context == self.tokens[row], "the row's blocks hold something else than its tokens"
                sampled.append(next_token(t for t in context if t is not None))
                self.tokens[row].append(sampled[-1])
        return StepResult(step.step_id, tuple(sampled))


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
