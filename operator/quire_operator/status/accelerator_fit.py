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

from quire_operator import names, quantity
from quire_operator.reports import MAX_PARAMETERS
from quire_operator.resources.scaling_behavior import DEFAULT_GPU_BATCH
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
_WORST_FIRST = ("False", "Unknown", "True")
_POD_KINDS = {names.ROLE_LEADER: "Decode", names.ROLE_PREFILL: "Prefill"}
_SOURCE = "source"  # a checksum of model.source, stored with the sizes


@dataclass(frozen=True, kw_only=True)
class RequestedAccelerator:
    """The accelerators that the spec requests: their profiles, or why one cannot be read. `profile`: of the
    pods that clients talk to.
    """

    profile: Profile | None = None
    prefill_profile: Profile | None = None
    error: str = ""

    @property
    def profiles(self) -> dict[str, Profile | None]:
        """By the name that `resources.build` has for each."""
        return {"profile": self.profile, "prefill_profile": self.prefill_profile}

    def of_role(self, role: str) -> Profile | None:
        """Of the pods of one role."""
        return self.prefill_profile if role == names.ROLE_PREFILL else self.profile


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
    """None where no accelerator is requested. `status`: status.model, with the size of the weights. Of two
    roles that one counts which fits worse, and both are described.
    """
    if model.spec.resources.accelerator is None:
        return None
    if requested.error:
        return "Unknown", "ProfileNotFound", reasons.message("ProfileNotFound", requested.error)
    found = [(one.role, _of_role(one, requested, _model(sizes), status)) for one in model.roles]
    value, reason, message = min((each for _, each in found), key=lambda each: _WORST_FIRST.index(each[0]))
    texts = {role: each[2] for role, each in found}
    if len(set(texts.values())) > 1:
        message = " ".join(f"{_POD_KINDS[role]} pods: {text}" for role, text in texts.items())
    return value, reason, message


def _of_role(
    model: LLMDeployment,
    requested: RequestedAccelerator,
    shape: ModelShape | None,
    status: Mapping[str, Any],
) -> ConditionValue:
    """Whether the pods of one role fit."""
    profile = requested.of_role(model.role)
    accelerator = Accelerator(
        memory=quantity.whole_bytes(profile.memory) if profile else 0,
        interconnect=profile.interconnect if profile else "",
    )
    serving = _serving(model, shape, status)
    host = quantity.whole_bytes(model.spec.resources.memory)
    hints = memory.advice(serving, accelerator, host_memory=host)
    if profile is None:
        return "Unknown", "MemoryUnknown", " ".join([_NO_PROFILE, *hints])
    if shape is None:
        known = "No pod has read the model's config.json yet; kubectl quire size calculates without one."
        return "Unknown", "ModelUnknown", " ".join([known, *hints])
    try:
        budget = memory.budget(shape, accelerator, serving)
    except SizingError as error:
        return "Unknown", "NotSized", " ".join([str(error), *hints])
    tier = model.spec.engine.kv_cache.host_offload
    beside = host - (quantity.whole_bytes(tier) if tier else 0)
    adapters = memory.adapter_advice(shape, serving, host_memory=beside)
    stored = memory.format_advice(shape, serving)
    hints = (*hints, *_staging_hint(serving, shape), *adapters, *stored)
    numbers = _numbers(budget, serving, shape, accelerator)
    if budget.verdict is Verdict.FITS:
        return "True", "Fits", " ".join([f"{numbers}.", *hints])
    reason = budget.verdict.value
    return "False", reason, " ".join([reasons.message(reason, numbers), *hints])


def _staging_hint(serving: Serving, shape: ModelShape) -> list[str]:
    length, fitting = serving.max_model_len or shape.longest, memory.staged_tokens(shape, serving)
    if not serving.staging or fitting >= length:
        return []
    return [
        f"disaggregation.stagingMemory has room for {fitting:,} tokens, so that decode pods compute the "
        f"rest of prompts of up to {length:,}. Raise it."
    ]


def _serving(model: LLMDeployment, shape: ModelShape | None, status: Mapping[str, Any]) -> Serving:
    engine, asked, roles = model.spec.engine, model.spec.resources.accelerator, model.spec.disaggregation
    assert asked is not None
    bits, loaded = 16.0, status.get("bytesTotal")
    if shape is not None and isinstance(loaded, int) and loaded > 0:
        bits = min(32.0, loaded * 8 / shape.parameters)  # as stored in the files
    cache = engine.kv_cache
    return Serving(
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs or DEFAULT_GPU_BATCH,
        weight_bits=bits,
        kv_bits=16 if cache.dtype == "Auto" else 8,
        utilization=asked.memory_percent / 100,
        host_weights=quantity.whole_bytes(engine.weight_offload) if engine.weight_offload else 0,
        kv_memory=quantity.whole_bytes(cache.memory) if cache.memory else None,
        tensor=model.spec.parallelism.tensor,
        pipeline=model.spec.parallelism.pipeline,
        nodes=model.spec.parallelism.nodes,
        staging=0 if roles is None else quantity.whole_bytes(roles.staging_memory),
        pools=model.spec.task == "Embed",
        max_adapters=engine.max_adapters or 0,
        max_adapter_rank=engine.max_adapter_rank or Serving.max_adapter_rank,
    )


def _numbers(budget: Budget, serving: Serving, shape: ModelShape, accelerator: Accelerator) -> str:
    """The memory budget in words."""
    length = serving.max_model_len or shape.longest
    most = f"{budget.concurrency} requests of {length:,} tokens fit at once"
    longest = f"one of {budget.longest:,} tokens fits alone" if budget.longest else "no request fits"
    wanted = f"{_gb(budget.kv_wanted)} for {serving.max_num_seqs} requests of {length:,} tokens"
    places = f"{serving.max_adapters} places for adapters {_gb(budget.adapters)}, " if budget.adapters else ""
    return (
        f"weights {_gb(budget.weights)}, {places}KV cache {wanted}, about {_gb(budget.workspace)} to work "
        f"with, of {_gb(budget.usable)} "
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
