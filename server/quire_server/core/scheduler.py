"""Signature only, for now."""

from collections.abc import Collection
from dataclasses import dataclass

from quire_server.core.request import Request
from quire_server.core.step import Step, StepResult, TokenEvent


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. ``watermark``: share of blocks kept free at admission, against preemption thrash."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    watermark: float = 0.01
    seed: int = 0  # seeds the requests that bring no seed of their own


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; the engine process exports them."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0


class Scheduler:
    def __init__(self, config: SchedulerConfig, *, eos_token_ids: Collection[int]) -> None:
        raise NotImplementedError

    num_running: int
    num_waiting: int
    kv_utilization: float
    has_work: bool
    stats: SchedulerStats

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit is answered by the next commit with an error event."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Forget a request (unknown ids are fine: it may just have finished). No event follows."""
        raise NotImplementedError

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. A step without rows only carries failures to
        commit.
        """
        raise NotImplementedError

    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Take in what the runner computed."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError when block accounting does not add up."""
        raise NotImplementedError
