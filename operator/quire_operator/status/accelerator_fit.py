"""The condition FitsAccelerator: whether the model fits its accelerator, with the numbers behind it.

The model's shape comes from the pods, which read config.json before any weight, and is kept in the status
while no pod reports it. The condition only warns: the arithmetic is `quire_sizing`'s, and the server measures
for itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from quire_operator import quantity
from quire_operator.reports import MAX_PARAMETERS
from quire_operator.resources.scaling_behavior import DEFAULT_BATCH
from quire_operator.spec import LLMDeployment, Profile
from quire_operator.status import reasons
from quire_operator.status.pods import PodState
from quire_operator.status.reasons import ConditionValue
from quire_sizing import memory
from quire_sizing.errors import SizingError
from quire_sizing.memory import Accelerator, Budget, Serving, Verdict
from quire_sizing.model import ModelShape

_NO_PROFILE = (
    "How much memory the GPU has is not known: name an AcceleratorProfile in spec.resources.profileRef "
    "instead of gpu."
)
_SOURCE = "source"  # a checksum of model.source, stored with the sizes


@dataclass(frozen=True, kw_only=True)
class RequestedAccelerator:
    """The accelerator that the spec requests: its profile, or why that cannot be read."""

    profile: Profile | None = None
    error: str = ""


def sizes(model: LLMDeployment, states: Sequence[PodState], old: Mapping[str, Any]) -> dict[str, int]:
    """`status.model.sizes`: as a current pod reports them, else as stored for the same source."""
    of = _checksum(model)
    reporting = [state for state in states if state.current and state.sample and state.sample.model]
    if reporting:
        youngest = max(reporting, key=lambda state: (state.created, state.name))
        assert youngest.sample is not None and youngest.sample.model is not None
        return {**asdict(youngest.sample.model), _SOURCE: of}
    known = old.get("sizes")
    return dict(known) if isinstance(known, Mapping) and known.get(_SOURCE) == of else {}


def condition(
    model: LLMDeployment, requested: RequestedAccelerator, sizes: Mapping[str, int], status: Mapping[str, Any]
) -> ConditionValue | None:
    """None where no accelerator is requested. `status`: status.model, with the size of the weights."""
    asked = model.spec.resources.accelerator
    if asked is None:
        return None
    if requested.error:
        return "Unknown", "ProfileNotFound", reasons.message("ProfileNotFound", requested.error)
    shape = _model(sizes)
    profile = requested.profile
    accelerator = Accelerator(
        memory=quantity.whole_bytes(profile.memory) if profile else 0,
        interconnect=profile.interconnect if profile else "",
    )
    serving = _serving(model, shape, status)
    hints = memory.advice(serving, accelerator, host_memory=quantity.whole_bytes(model.spec.resources.memory))
    if requested.profile is None:
        return "Unknown", "MemoryUnknown", " ".join([_NO_PROFILE, *hints])
    if shape is None:
        known = "No pod has read the model's config.json yet; kubectl quire size calculates without one."
        return "Unknown", "ModelUnknown", " ".join([known, *hints])
    try:
        budget = memory.budget(shape, accelerator, serving)
    except SizingError as error:
        return "Unknown", "NotSized", " ".join([str(error), *hints])
    numbers = _numbers(budget, serving, shape, accelerator)
    if budget.verdict is Verdict.FITS:
        return "True", "Fits", " ".join([f"{numbers}.", *hints])
    reason = budget.verdict.value
    return "False", reason, " ".join([reasons.message(reason, numbers), *hints])


def _serving(model: LLMDeployment, shape: ModelShape | None, status: Mapping[str, Any]) -> Serving:
    engine, asked = model.spec.engine, model.spec.resources.accelerator
    assert asked is not None
    bits = {"Int8": 8.0}.get(engine.quantization) or {"Float32": 32.0}.get(engine.dtype)
    loaded = status.get("bytesTotal")
    if bits is None and shape is not None and isinstance(loaded, int) and loaded > 0:
        bits = min(32.0, loaded * 8 / shape.parameters)  # as stored in the files
    cache = engine.kv_cache
    computed = 32 if engine.dtype == "Float32" else 16
    return Serving(
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs or DEFAULT_BATCH,
        weight_bits=bits or 16.0,
        kv_bits=computed if cache.dtype == "Auto" else 8,
        utilization=asked.memory_percent / 100,
        host_weights=quantity.whole_bytes(engine.weight_offload) if engine.weight_offload else 0,
        kv_memory=quantity.whole_bytes(cache.memory) if cache.memory else None,
        tensor=model.spec.parallelism.tensor,
        pipeline=model.spec.parallelism.pipeline,
        nodes=model.spec.parallelism.nodes,
    )


def _numbers(budget: Budget, serving: Serving, shape: ModelShape, accelerator: Accelerator) -> str:
    """The memory budget in words."""
    length = serving.max_model_len or shape.longest
    most = f"{budget.concurrency} requests of {length:,} tokens fit at once"
    longest = f"one of {budget.longest:,} tokens fits alone" if budget.longest else "no request fits"
    wanted = f"{_gb(budget.kv_wanted)} for {serving.max_num_seqs} requests of {length:,} tokens"
    return (
        f"weights {_gb(budget.weights)}, KV cache {wanted}, about {_gb(budget.workspace)} to work with, of "
        f"{_gb(budget.usable)} "
        f"({serving.utilization:.0%} of {_gb(accelerator.memory)}); {most}, {longest}"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _model(sizes: Mapping[str, int]) -> ModelShape | None:
    """The stored shape, validated: a user who may write the status can put anything there."""
    values: dict[str, int] = {}
    for item in fields(ModelShape):
        least, default = (1, None) if item.default is MISSING else (0, item.default)
        value = sizes.get(item.name, default)
        if not (isinstance(value, int) and least <= value <= MAX_PARAMETERS):
            return None
        values[item.name] = value
    return ModelShape(**values)


def _checksum(model: LLMDeployment) -> int:
    source = json.dumps(asdict(model.spec.model.source), sort_keys=True)
    return zlib.crc32(source.encode())
