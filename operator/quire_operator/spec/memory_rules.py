"""Rules of what lies in the host's memory, or on its disk: the KV cache, and weights that a GPU has no room
for. The CRD has them in CEL.

`rules.check` calls them, and the same table of cases (e2e/api) drives both.
"""

from __future__ import annotations

from quire_operator import quantity
from quire_operator.errors import SpecError
from quire_operator.spec.tree import Spec

MAX_DISK = "64Ti"


def check(spec: Spec) -> None:
    """Every rule, in the order of the fields."""
    _check_kv_cache(spec)
    _check_weight_offload(spec)


def _check_kv_cache(spec: Spec) -> None:
    cache, memory = spec.engine.kv_cache, quantity.parse(spec.resources.memory)
    on_host = "" if spec.resources.accelerator is not None else cache.memory
    for field, size in (("memory", on_host), ("hostOffload", cache.host_offload)):
        if size and not 0 < quantity.parse(size) < memory:
            raise SpecError(
                f"spec.engine.kvCache.{field}",
                "the weights need room beside it: give more than 0 and less than resources.memory",
            )
    if cache.memory and not quantity.parse(cache.memory) > 0:
        raise SpecError("spec.engine.kvCache.memory", "give a positive quantity, such as 4Gi")
    together = sum(quantity.parse(size) for size in (on_host, cache.host_offload) if size)
    if cache.host_offload and together >= memory:
        raise SpecError(
            "spec.engine.kvCache.hostOffload",
            "the weights need room beside it and kvCache.memory: together give less than resources.memory",
        )
    if cache.disk_offload and not 0 < quantity.parse(cache.disk_offload) <= quantity.parse(MAX_DISK):
        raise SpecError(
            "spec.engine.kvCache.diskOffload", f"give a positive quantity up to {MAX_DISK}, such as 20Gi"
        )
    if cache.disk_offload and not cache.host_offload:
        raise SpecError(
            "spec.engine.kvCache.diskOffload", "blocks reach the disk through the host: set hostOffload too"
        )
    if cache.preemption_mode == "Swap" and not cache.host_offload:
        raise SpecError(
            "spec.engine.kvCache.preemptionMode", "Swap keeps blocks on the host: set hostOffload"
        )


def _check_weight_offload(spec: Spec) -> None:
    size, blocks = spec.engine.weight_offload, spec.engine.kv_cache.host_offload
    if not size:
        return
    if spec.resources.accelerator is None:
        raise SpecError(
            "spec.engine.weightOffload",
            "without a GPU all weights are in the host's memory: set resources.gpu",
        )
    together = sum(quantity.parse(each) for each in (size, blocks) if each)
    if not quantity.parse(size) > 0 or together >= quantity.parse(spec.resources.memory):
        raise SpecError(
            "spec.engine.weightOffload",
            "give more than 0, and together with kvCache.hostOffload less than resources.memory",
        )
