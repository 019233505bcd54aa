"""The GPUs' part of /metrics: memory and utilisation, as NVML tells them. Registered by ``metrics``.

NVML can hang in a broken driver, so a thread asks it every few seconds and a scrape shows the last word.
There is no series where there is nothing to say: no GPU, no NVML, or a last word that has become old. A 0
would be read as an idle GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pynvml
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 5.0
_STALE_SECONDS = 20.0
_ABSENT = " No series: no NVIDIA GPU, or NVML does not answer."


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment: bytes of memory by kind (used, free, total), and busy time as a share."""

    gpu_id: str
    memory: Mapping[str, int]
    utilization: float


class GpuCollector(Collector):
    """Metric families made of the last samples."""

    def __init__(self, ours: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._ours = ours
        self._clock = clock
        self._samples: tuple[GpuSample, ...] = ()
        self._sampled_at = float("-inf")
        self._engine_takes: Mapping[str, int] = {}

    def engine_takes(self, memory: Mapping[str, int]) -> None:
        """Bytes that the engine takes by kind, as it found when it started: they do not change any more."""
        self._engine_takes = memory

    def watch(self) -> None:
        """Ask NVML from now on, in a thread of its own. Without NVML that is logged once, and all."""
        threading.Thread(target=self._watch, name="nvml", daemon=True).start()

    def take(self, samples: tuple[GpuSample, ...]) -> None:
        """The newest word."""
        self._samples, self._sampled_at = samples, self._clock()

    def collect(self) -> Iterator[Metric]:
        """Both families; without a sample where there is nothing to say."""
        is_fresh = self._clock() - self._sampled_at < _STALE_SECONDS
        samples = self._samples if is_fresh else ()
        memory = GaugeMetricFamily(
            "llm_gpu_memory_bytes",
            "Memory of the GPU by kind: used, free, total; of these, for this server's weights, kv, graphs "
            "and workspace." + _ABSENT,
            labels=["gpu_id", "kind"],
        )
        busy = GaugeMetricFamily(
            "llm_gpu_utilization_ratio",
            "Share of time in which a kernel ran, 0 to 1." + _ABSENT,
            labels=[*self._ours, "gpu_id"],
        )
        for sample in samples:
            busy.add_metric([*self._ours.values(), sample.gpu_id], sample.utilization)
            for kind, value in sample.memory.items():
                memory.add_metric([sample.gpu_id, kind], value)
        for kind, value in self._engine_takes.items():
            memory.add_metric(["0", kind], value)  # the engine takes the first that the pod has
        yield memory
        yield busy

    def _watch(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.info("no GPU metrics", extra={"why": str(error)})
            return
        while True:
            with contextlib.suppress(pynvml.NVMLError):  # what is not told any more becomes stale
                self.take(read())
            time.sleep(_PERIOD_SECONDS)


def read() -> tuple[GpuSample, ...]:
    """Every GPU that NVML shows, which in a pod are the pod's. Raises pynvml.NVMLError."""
    found: list[GpuSample] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        busy = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        kinds = {"used": int(memory.used), "free": int(memory.free), "total": int(memory.total)}
        found.append(GpuSample(str(index), kinds, busy))
    return tuple(found)
