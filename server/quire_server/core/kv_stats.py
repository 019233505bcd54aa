"""The KV cache in numbers, as the engine tells the API process. Filled by ``kv_manager``, exported by
``metrics``.
"""

from typing import NamedTuple


class KVStats(NamedTuple):
    """Gauges in blocks, and counters since the start. ``prefix_*`` count tokens, the rest blocks."""

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
