"""The GPUs on /metrics, as NVML reports them; a fake library replaces NVIDIA's."""

import time

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire_server.metrics import gpu
from quire_server.metrics.requests import Metrics

GIB = 1 << 30


class Nvml:
    """Two GPUs; the arguments are what pynvml passes by reference."""

    def __init__(self):
        self.used = [3 * GIB, 70 * GIB]
        self.busy = [0, 97]
        self._index = 0

    def nvmlInitWithFlags(self, flags):
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.used)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        self._index = index.value
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMemoryInfo(self, device, memory):
        used = self.used[self._index]
        if used is None:
            return pynvml.NVML_ERROR_NO_PERMISSION
        memory._obj.total, memory._obj.used, memory._obj.free = 80 * GIB, used, 80 * GIB - used
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUtilizationRates(self, device, rates):
        if self.busy[self._index] is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        rates._obj.gpu = self.busy[self._index]
        return pynvml.NVML_SUCCESS


@pytest.fixture
def nvml(monkeypatch):
    library = Nvml()
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(gpu, "_PERIOD_SECONDS", 0.01)
    return library


def shown(metrics):
    """Values by name, GPU and kind."""
    return {
        (sample.name, sample.labels["gpu_id"], sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families(metrics.exposition("")[0].decode())
        for sample in family.samples
        if "gpu_id" in sample.labels
    }


def expected(nvml):
    found = {}
    for index, (used, busy) in enumerate(zip(nvml.used, nvml.busy, strict=True)):
        for kind, value in (("used", used), ("free", 80 * GIB - used), ("total", 80 * GIB)):
            found["llm_gpu_memory_bytes", str(index), kind] = value
        found["llm_gpu_utilization_ratio", str(index), None] = busy / 100
    return found


def test_memory_and_utilisation_of_each_gpu_are_shown_and_move(nvml):
    metrics = Metrics("tiny")
    metrics.gpus.watch()
    for used, busy in (([3 * GIB, 70 * GIB], [0, 97]), ([5 * GIB, 70 * GIB], [50, 97])):
        nvml.used, nvml.busy = used, busy
        end = time.monotonic() + 60
        while shown(metrics) != expected(nvml):
            assert time.monotonic() < end, shown(metrics)
            time.sleep(0.01)


def test_a_field_that_nvml_does_not_report_leaves_the_others_as_of_a_mig_slice(nvml):
    nvml.used, nvml.busy = [3 * GIB, None], [None, 97]
    metrics = Metrics("tiny")
    metrics.gpus.take(gpu.read())
    assert shown(metrics) == {
        ("llm_gpu_memory_bytes", "0", "used"): 3 * GIB,
        ("llm_gpu_memory_bytes", "0", "free"): 77 * GIB,
        ("llm_gpu_memory_bytes", "0", "total"): 80 * GIB,
        ("llm_gpu_utilization_ratio", "1", None): 0.97,
    }
