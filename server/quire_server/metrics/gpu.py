"""The GPUs' part of /metrics: memory and utilisation, as NVML reports them.

NVML can hang in a broken driver, so a thread samples it every few seconds and a scrape shows the last sample.
There is no series without a recent sample (no GPU, no NVML, or a sample that has become old), since a 0 would
be read as an idle GPU.
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
    """One GPU at one moment: bytes of memory by kind (used, free, total), and busy time as a share. What NVML
    does not report is missing: a MIG slice has no utilisation.
    """

    gpu_id: str
    memory: Mapping[str, int]
    utilization: float | None


class GpuCollector(Collector):
    """Makes metric families of the last samples."""

    def __init__(self, ours: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._ours = ours
        self._clock = clock
        self._samples: tuple[GpuSample, ...] = ()
        self._sampled_at = float("-inf")
        self._engine_memory: Mapping[str, int] = {}

    def set_engine_memory(self, memory: Mapping[str, int]) -> None:
        """Bytes that the engine uses by kind; measured once, at its start; they do not change."""
        self._engine_memory = memory

    def watch(self) -> None:
        """Start a thread that samples NVML. Without NVML it logs that once and ends."""
        threading.Thread(target=self._watch, name="nvml", daemon=True).start()

    def take(self, samples: tuple[GpuSample, ...]) -> None:
        """Keep the newest samples and the time at which they were taken."""
        self._samples, self._sampled_at = samples, self._clock()

    def collect(self) -> Iterator[Metric]:
        """Both families; they are empty without a recent sample."""
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
            if sample.utilization is not None:
                busy.add_metric([*self._ours.values(), sample.gpu_id], sample.utilization)
            for kind, value in sample.memory.items():
                memory.add_metric([sample.gpu_id, kind], value)
        for kind, value in self._engine_memory.items():
            memory.add_metric(["0", kind], value)  # the engine uses the pod's first GPU
        yield memory
        yield busy

    def _watch(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.info("no GPU metrics", extra={"why": str(error)})
            return
        while True:
            with contextlib.suppress(pynvml.NVMLError):  # samples that are not renewed become stale
                self.take(read())
            time.sleep(_PERIOD_SECONDS)


def read() -> tuple[GpuSample, ...]:
    """A sample of every GPU that NVML shows; in a pod these are the pod's. Raises pynvml.NVMLError."""
    found: list[GpuSample] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        found.append(GpuSample(str(index), _memory(device), _utilization(device)))
    return tuple(found)


def _memory(device: object) -> dict[str, int]:
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        return {"used": int(memory.used), "free": int(memory.free), "total": int(memory.total)}
    return {}


def _utilization(device: object) -> float | None:
    with contextlib.suppress(pynvml.NVMLError):
        return float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100
    return None
