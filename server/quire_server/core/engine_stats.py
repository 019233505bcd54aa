"""The engine in numbers, as it tells the API process with every step. Filled by ``loop``, read for admission,
exported by ``step_metrics``.
"""

from typing import NamedTuple

from quire_server.core.kv_stats import KVStats
from quire_server.core.speculation_stats import SpeculationStats


class EngineStats(NamedTuple):
    """Gauges and lifetime counters. A NamedTuple, as all that is sent with every step."""

    running: int = 0
    waiting: int = 0
    kv_utilization: float = 0.0
    batch_size: int = 0  # requests in the step just done, 0 when none was
    preemptions: int = 0
    kv: KVStats = KVStats()
    blocks_unaccounted: int = 0  # nobody's: 0, or the books are wrong
    speculation: SpeculationStats = SpeculationStats()
    step_tokens: int = 0  # tokens computed in the step just done
    deferred: int = 0  # requests that cannot run before their grammar is built
