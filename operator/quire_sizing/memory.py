"""What fits: weights, KV cache and working memory of one replica against the memory of its accelerators.

Called with a ``Model``, an ``Accelerator`` and what the replica is to do. Weights and KV bytes are exact, the
working memory is an estimate (the server measures its own at start and goes by that); nothing here is a
promise of speed but ``decode_bound``, which no implementation exceeds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from quire_sizing.errors import SizingError
from quire_sizing.model import Model

_CUDA = 600 << 20  # what a process takes of a GPU before its first tensor
_FEW, _MANY = 0.85, 0.90  # of an accelerator's memory
_SCALE = 4  # bytes, of a key or a value that is kept in numbers of 8 bits


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Bytes, and bytes a second."""

    memory: int
    bandwidth: int = 0  # 0: unknown


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What one replica is to do. ``max_model_len`` None: as long as the model allows. Bits: of one number."""

    max_model_len: int | None = None
    max_num_seqs: int = 256
    weight_bits: float = 16
    kv_bits: int = 16
    utilization: float = _MANY
    tensor_parallel: int = 1
    max_num_batched_tokens: int = 2048
    host_weights: int = 0  # bytes of them that stay in the host's memory
    kv_memory: int | None = None  # bytes of the cache on one accelerator; None: what the rest leaves


class Verdict(enum.StrEnum):
    """Whether what was asked for fits."""

    FITS = "Fits"
    FEWER = "FitsFewer"  # the longest request does, but not so many of that length at once
    NOTHING = "DoesNotFit"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of one accelerator of the replica."""

    verdict: Verdict
    usable: int
    weights: int
    workspace: int  # estimated
    kv_per_token: int
    kv_wanted: int  # for all sequences at their longest
    longest: int  # context that fits for one sequence alone; 0 = none
    concurrency: int  # sequences of the wanted length that fit at once


def weight_bytes(parameters: int, bits: float = 16) -> int:
    """Of weights of so many bits each; scales of quantised ones come on top, 0.1 to 0.5 bits each."""
    return round(parameters * bits / 8)


def kv_bytes_per_token(model: Model, bits: int = 16, tensor_parallel: int = 1) -> int:
    """On each of the accelerators; a KV head is never divided, so that more of them than heads share none."""
    heads = -(-model.num_kv_heads // tensor_parallel)
    row = model.head_size * bits // 8 + (_SCALE if bits == 8 else 0)
    return 2 * model.num_layers * heads * row


def decode_bound(bandwidth: float, weights: float) -> float:
    """Tokens a second of one stream at most: each token reads all weights once."""
    return bandwidth / weights


def workspace(model: Model, serving: Serving) -> int:
    """Estimate: the process, a step's activations (some ten rows of the hidden size for each token), and
    float32 logits with their copy for sampling.
    """
    activations = serving.max_num_batched_tokens * model.hidden_size * 10 * 2
    return _CUDA + activations + 2 * 4 * serving.max_num_seqs * model.vocab_size


def budget(model: Model, accelerator: Accelerator, serving: Serving) -> Budget:
    """What is left for the KV cache, and what fits into it. Raises SizingError for limits that are none."""
    _check(model, serving)
    wanted = serving.max_model_len or model.longest
    usable = int(accelerator.memory * serving.utilization)
    weights = weight_bytes(model.parameters, serving.weight_bits) // serving.tensor_parallel
    weights = max(0, weights - serving.host_weights)
    room = usable - weights - workspace(model, serving)
    if serving.kv_memory is not None:
        room = min(room, serving.kv_memory)
    each = kv_bytes_per_token(model, serving.kv_bits, serving.tensor_parallel)
    fitting = max(0, room) // each
    concurrency = fitting // wanted
    if concurrency >= serving.max_num_seqs:
        verdict = Verdict.FITS
    else:
        verdict = Verdict.FEWER if concurrency else Verdict.NOTHING
    return Budget(
        verdict=verdict,
        usable=usable,
        weights=weights,
        workspace=workspace(model, serving),
        kv_per_token=each,
        kv_wanted=each * wanted * serving.max_num_seqs,
        longest=min(fitting, model.longest),
        concurrency=concurrency,
    )


def advice(serving: Serving, accelerator: Accelerator, *, host_memory: int) -> tuple[str, ...]:
    """What is likely a mistake although it may work, each with its remedy."""
    found = []
    if not _FEW <= serving.utilization <= _MANY:
        found.append(
            f"memoryPercent gives {serving.utilization * 100:g} % of the accelerator's memory: below "
            f"{_FEW * 100:g} some lies idle, above {_MANY * 100:g} a step may fail for want of it. Set a "
            "value between them."
        )
    if serving.max_model_len is None:
        found.append(
            "maxModelLen is not set, so the model's own limit holds: set the longest prompt and answer that "
            "you serve, and more requests fit."
        )
    if host_memory < accelerator.memory * serving.tensor_parallel:
        found.append(
            "The memory of the container is below that of its accelerators: weights pass through it while "
            "they are loaded. Raise resources.memory."
        )
    return tuple(found)


def _check(model: Model, serving: Serving) -> None:
    if serving.max_model_len is not None and not 0 < serving.max_model_len <= model.longest:
        raise SizingError(
            f"maxModelLen is {serving.max_model_len}; give 1 to {model.longest}, what the model was made for."
        )
    if serving.max_num_seqs < 1:
        raise SizingError(f"maxNumSeqs is {serving.max_num_seqs}; give 1 or more.")
    if not 0 < serving.utilization <= 1:
        raise SizingError(
            f"gpu-memory-utilization is {serving.utilization:g}; give a share above 0, up to 1."
        )
    if serving.tensor_parallel < 1:
        raise SizingError(f"tensor is {serving.tensor_parallel}; give 1 or more accelerators.")
