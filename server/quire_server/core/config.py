"""The configuration of the scheduler, and the check whether a request fits into its limits at all."""

from dataclasses import dataclass
from enum import StrEnum

from quire_server.core.policy import Policy
from quire_server.core.request import Request


class Batching(StrEnum):
    """Values of ``--batching``. Static batching (nothing joins a running batch) exists for comparison
    only.
    """

    CONTINUOUS = "continuous"
    STATIC = "static"


class PreemptionMode(StrEnum):
    """Values of ``--preemption-mode``: a preempted request's KV blocks are recomputed, or swapped to the
    host.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"


class SpeculativeMethod(StrEnum):
    """Values of ``--speculative-method``: where drafts come from."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """At most ``num_tokens`` drafts for each request and step. The n-gram proposer matches the last
    ``lookup_max`` tokens first, and as few as ``lookup_min``.
    """

    method: SpeculativeMethod
    num_tokens: int
    lookup_min: int = 2
    lookup_max: int = 4


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine.

    ``free_block_reserve``: share of the KV blocks that admission leaves free, so that new requests do not
    cause preemptions at once. ``max_pinned_share``: largest share of blocks that explicit prompt caching may
    keep from eviction. Slots: KV blocks that the lower tiers hold, or that are staged: on the host, on their
    way between a GPU and another server.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    pools: bool = False  # whole prompts without an answer; one that exceeds the budget has a step of its own
    free_block_reserve: float = 0.01
    max_pinned_share: float = 0.25
    num_host_slots: int = 0
    num_disk_slots: int = 0
    num_staging_slots: int = 0  # more than 0 only without lower tiers
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    seed: int = 0  # from which the seeds of requests without one are derived
    policy: Policy = Policy.FCFS
    batching: Batching = Batching.CONTINUOUS
    speculation: SpeculationConfig | None = None
    num_adapter_slots: int = 0  # LoRA adapters that are on the device at once
    pipeline_size: int = 1  # stages that compute the model one after the other

    @property
    def allows_async_scheduling(self) -> bool:
        """Whether a step can be scheduled before the result of the previous one. Speculative decoding needs
        the result for the number of tokens, KV offload for whether a prefix could be loaded.
        """
        return self.speculation is None and not self.num_host_slots

    @property
    def num_slots(self) -> int:
        """Steps in flight that have requests of their own: one for each stage of a pipeline."""
        is_continuous = self.batching is Batching.CONTINUOUS
        return self.pipeline_size if self.allows_async_scheduling and is_continuous else 1

    @property
    def token_budget(self) -> int:
        """Tokens per step. Without chunked prefill the longest prompt fits beside all decodes, or it would
        never be scheduled.
        """
        if self.enable_chunked_prefill or self.pools:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, self.max_model_len + self.max_num_seqs)

    @property
    def shares_prompts(self) -> bool:
        """Whether of equal prompts that come together the first one is computed, and the others find it in
        the prefix cache. A static batch begins with all of its prompts.
        """
        return self.enable_prefix_caching and not self.pools and self.batching is Batching.CONTINUOUS

    @property
    def low_priority_budget(self) -> int | None:
        """Of these, for prompts whose priority is below normal, while others come: a request waits for the
        end of the step that has begun. None where priorities decide nothing or prompts are not split.
        """
        is_continuous = self.batching is Batching.CONTINUOUS
        is_split = self.enable_chunked_prefill and not self.pools
        if self.policy is Policy.PRIORITY and is_split and is_continuous:
            return min(self.token_budget, max(self.block_size, self.token_budget // 32))
        return None


def rejection_reason(request: Request, config: SchedulerConfig) -> str | None:
    """Why this request can never run with these limits, or None."""
    length = len(request.prompt_token_ids) + len(request.output_token_ids)
    if not request.prompt_token_ids:
        return "The prompt is empty."
    if request.sampling.max_tokens < 1:
        return "max_tokens must be at least 1."
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        return "The answer that is to go on has max_tokens already."
    if length >= config.max_model_len:
        return (
            f"The prompt has {length} tokens; with a context of {config.max_model_len} tokens "
            f"it may have {config.max_model_len - 1}. Shorten it."
        )
    needed = -(-(length + 1) // config.block_size)
    return too_long_reason(needed, config) if needed > config.num_blocks else None


def too_long_reason(num_blocks: int, config: SchedulerConfig) -> str:
    """The error of a request that needs more blocks than the cache has."""
    return (
        f"The request needs {num_blocks * config.block_size} tokens of KV cache, and the whole cache holds "
        f"{config.num_blocks * config.block_size}. Shorten it, or give the server more KV cache."
    )
