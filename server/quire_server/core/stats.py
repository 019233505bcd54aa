"""What the engine reports to the API process with every step, for metrics, admission and traces.

What is serialised with every step is a NamedTuple of plain numbers. Nothing is decided here.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Timing:
    """Timestamps of one request, in seconds of the monotonic clock that all processes of a server share. The
    first and the last event of a request carry one.

    ``scheduled`` is the last time before the first token at which the request was given a row: if it was
    preempted before that, the wait counts as queueing. A later preemption counts as decode time.
    """

    queued: float
    scheduled: float
    first_token: float
    finished: float | None  # None: not finished yet
    preemptions: int


class TierStats(NamedTuple):
    """One lower KV tier: slots, slots in use, and counters of blocks since the start."""

    slots: int
    used: int
    stored: int
    loaded: int
    evicted: int


class KVStats(NamedTuple):
    """The KV cache: gauges in blocks, and counters since the start. ``prefix_*`` count tokens, the rest
    blocks.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    evictions: int = 0
    pinned: int = 0
    pins_refused: int = 0
    swaps: int = 0  # preempted requests whose blocks were kept on the host
    corrupt: int = 0
    host_slots: int = 0
    host_used: int = 0
    host_stored: int = 0
    host_loaded: int = 0
    host_evicted: int = 0
    disk_slots: int = 0
    disk_used: int = 0
    disk_stored: int = 0
    disk_loaded: int = 0
    disk_evicted: int = 0
    disk_failed: bool = False


class SpeculationStats(NamedTuple):
    """Speculative decoding: counters since the start. A draft is one proposal of several tokens."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # by position in the draft, up to the longest draft
    pauses: int = 0  # times that a request stopped drafting for a while, because it did not pay


class TransferStats(NamedTuple):
    """KV blocks from or for other servers: gauges, and counters since the start."""

    succeeded: int = 0  # prefixes that were read from a producer
    failed: int = 0  # prefixes that were computed here in place of that
    blocks: int = 0  # that were read
    held: int = 0  # prefixes that wait to be read here
    computing: int = 0  # prefixes that are computed here for other servers


class AdapterStats(NamedTuple):
    """LoRA adapters: gauges, and a counter since the start. ``running``, ``waiting``: names of those that
    have requests which run, or wait.
    """

    loaded: int = 0  # on the host
    resident: int = 0  # on the device
    failed: int = 0  # names whose last load failed
    slot_loads: int = 0  # copies to the device
    slots: int = 0  # places on the device
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class SchedulerStats(NamedTuple):
    """The scheduler: counters since the start."""

    preemptions: int = 0
    speculation: SpeculationStats = SpeculationStats()


class EngineStats(NamedTuple):
    """The whole engine: gauges, and counters since the start."""

    running: int = 0
    waiting: int = 0
    kv_utilization: float = 0.0
    batch_size: int = 0  # requests in the latest step, 0 when idle
    preemptions: int = 0
    kv: KVStats = KVStats()
    blocks_unaccounted: int = 0  # leaked KV blocks: more than 0 is a bug
    speculation: SpeculationStats = SpeculationStats()
    step_tokens: int = 0  # tokens computed in the latest step
    deferred: int = 0  # requests that wait until their grammar is compiled
    growth_blocks: int = 0  # KV blocks that running requests are expected to need beside those they hold
    waiting_blocks: int = 0  # KV blocks that waiting and deferred requests are expected to need
    transfers: TransferStats = TransferStats()
    adapters: AdapterStats = AdapterStats()
