"""The scheduler's limits and counters: what its caller sets and reads."""

from dataclasses import dataclass
from enum import StrEnum

from quire_server.core.policy import Policy
from quire_server.core.speculation_stats import SpeculationStats


class Batching(StrEnum):
    """Values of ``--batching``. Static exists to be compared with: nobody joins a batch that has begun."""

    CONTINUOUS = "continuous"
    STATIC = "static"


class PreemptionMode(StrEnum):
    """What becomes of a preempted request's KV blocks: given up, or kept on the host until it goes on."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class SpeculativeMethod(StrEnum):
    """Values of ``--speculative-method``: where drafts come from."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """At most ``num_tokens`` drafts for each request and step; a look-up compares the last ``lookup_max``
    tokens, and as few as ``lookup_min``.
    """

    method: SpeculativeMethod
    num_tokens: int
    lookup_min: int = 2
    lookup_max: int = 4


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. ``watermark``: share of blocks that admission leaves free, against thrashing;
    ``pinnable``: largest share that explicit prompt caching may keep from eviction; slots: blocks that the
    lower tiers hold.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    watermark: float = 0.01
    pinnable: float = 0.25
    num_host_slots: int = 0
    num_disk_slots: int = 0
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    seed: int = 0  # seeds the requests that bring no seed of their own
    policy: Policy = Policy.FCFS
    batching: Batching = Batching.CONTINUOUS
    speculation: SpeculationConfig | None = None

    @property
    def may_look_ahead(self) -> bool:
        """Whether a step can be decided before the result of the one before: drafts say only then how many
        tokens there are, and lower tiers whether a prefix came.
        """
        return self.speculation is None and not self.num_host_slots

    @property
    def token_budget(self) -> int:
        """Tokens per step. Prompts that must not be cut fit beside all decodes, or they would starve."""
        if self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, self.max_model_len + self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the start; the engine process exports them."""

    preemptions: int = 0
    speculation: SpeculationStats = SpeculationStats()
