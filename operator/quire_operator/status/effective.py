"""What the engine serves with (context, dtype, quantisation, CPU kernels) in status.engine, and the condition
ContextReduced.

A KV cache that holds less than the model's context shortens what clients may ask, and int8 by default rounds
what they get: both are said here, because the pods are Ready all the same. Pure; decides about no pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator import quantity
from quire_operator.reports import Effective
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.reasons import ConditionValue

MIN_CONTEXT = 2048  # a model whose own context is shorter needs all of it
_MEBIBYTE = 1 << 20
_KEYS = ("maxModelLen", "wantedModelLen", "dtype", "quantization", "inexactDefaults", "nativeKernels")


def summary(states: Sequence[PodState], old: Mapping[str, Any]) -> dict[str, Any]:
    """Its part of status.engine: of the pod of the newest revision with the shortest context, else as stored.

    A ready pod that has not been asked since the operator's start may be the one of which the stored values
    are.
    """
    reported = [_reported(state) for state in states if state.current]
    known = [_as_status(said) for said in reported if said is not None]
    stored = {key: old[key] for key in _KEYS if key in old}
    if isinstance(stored.get("maxModelLen"), int) and (not known or _is_any_unasked(states)):
        known.append(stored)
    return min(known, key=lambda said: int(said["maxModelLen"]), default={})


def condition(model: LLMDeployment, engine: Mapping[str, Any]) -> ConditionValue | None:
    """ContextReduced; None until a pod has said what it serves. `engine`: status.engine."""
    length, wanted = engine.get("maxModelLen"), engine.get("wantedModelLen")
    if not (isinstance(length, int) and isinstance(wanted, int)):
        return None
    if length >= wanted:
        return "False", "AsWanted", f"A request may have {length:,} tokens, prompt and answer together."
    reason = "ContextTooSmall" if _is_too_small(length, wanted) else "ContextReduced"
    return "True", reason, reasons.message(reason, _numbers(model, length, wanted))


def too_small(model: LLMDeployment, states: Sequence[PodState], engine: Mapping[str, Any]) -> Failure | None:
    """The context of the newest revision's pods where it is too small to be of use."""
    if not any(state.current and (state.ready or _reported(state)) for state in states):
        return None  # what is stored is about pods that are being replaced
    reduced = condition(model, engine)
    if reduced is None or reduced[1] != "ContextTooSmall":
        return None
    numbers = _numbers(model, engine["maxModelLen"], engine["wantedModelLen"])
    return Failure(reason="ContextTooSmall", detail=numbers)


def _reported(state: PodState) -> Effective | None:
    return state.sample.effective if state.sample is not None else None


def _is_any_unasked(states: Sequence[PodState]) -> bool:
    return any(state.current and state.ready and state.sample is None for state in states)


def _as_status(said: Effective) -> dict[str, Any]:
    values = (
        said.max_model_len,
        said.wanted_model_len,
        said.dtype,
        said.quantization,
        list(said.inexact_defaults),
        said.native_kernels,
    )
    return {key: value for key, value in zip(_KEYS, values, strict=True) if value}


def _is_too_small(length: int, wanted: int) -> bool:
    return length < min(MIN_CONTEXT, wanted)


def _numbers(model: LLMDeployment, length: int, wanted: int) -> str:
    """Both numbers, and the KV cache that would hold the whole context where the spec gives its size."""
    numbers = f"{length:,} of {wanted:,} tokens"
    given = model.spec.engine.kv_cache.memory
    if not given:
        return numbers
    needed = -(-quantity.whole_bytes(given) * wanted // (length * _MEBIBYTE))
    return f"{numbers}; kvCache.memory {needed}Mi would hold them all"
