"""Whether weights, KV cache and working memory of one replica fit the memory of its accelerator, or of each
of several that share its layers or have a stage of them each.

Weights and KV bytes are exact. The working memory is an estimate (the server measures its own at start and
uses that). The only statement about speed is ``decode_bound``, an upper bound.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_sizing.errors import SizingError
from quire_sizing.model import ModelShape, check_tensor, rank_adapted, rank_kv_heads, rank_parameters
from quire_sizing.stages import check_pipeline, stage_layers, stages

_CUDA = 600 << 20  # memory of a GPU that a process uses before its first tensor
_MAX_BITS = 32  # of a weight: float32
_EXCHANGE = 512 << 20  # buffers through which NCCL exchanges with the other ranks
_FEW, _MANY = 0.85, 0.90  # share of an accelerator's memory
#: Bytes of the host in which the server keeps responses of /v1/responses.
RESPONSES = 64 << 20
_MAX_HOST_ADAPTERS, _HOST_SHARE = 256, 4  # adapters on the host, in a quarter of what is left there
# The most tokens of a step, from so many bytes on: the server's defaults; a contract test compares them.
LARGE, STEP_TOKENS, LARGE_STEP_TOKENS = 64 << 30, 2048, 8192
_SCALE = 4  # bytes, of a key or a value that is kept in numbers of 8 bits
_DEQUANTIZED_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Bytes, and bytes per second. ``interconnect``: of several in one node, such as PCIe or NVLink."""

    memory: int
    bandwidth: int = 0  # 0: unknown
    interconnect: str = ""  # empty: unknown


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The requested configuration of one replica. ``max_model_len`` None: the model's maximum. Bits: per
    number. ``tensor``: the ranks that share each layer, each with an accelerator; ``pipeline``: the stages
    that have consecutive layers each; ``nodes``: over which all ranks are spread, in their order.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    weight_bits: float = 16
    kv_bits: int = 16
    utilization: float = _MANY
    max_num_batched_tokens: int | None = None  # None: the server's default for the accelerator
    host_weights: int = 0  # bytes of weights that stay in host memory, of all ranks
    kv_memory: int | None = None  # bytes of the KV cache, of all ranks; None: what remains
    staging: int = 0  # bytes of the host for KV blocks between prefill and decode pods
    tensor: int = 1
    pipeline: int = 1
    nodes: int = 1
    pools: bool = False  # it embeds texts: there are neither a KV cache nor logits
    max_adapters: int = 0  # LoRA adapters on the accelerator at once
    max_adapter_rank: int = 16
    adapter_bits: int = 16  # of each number of an adapter: as the model computes

    @property
    def ranks(self) -> int:
        """All of them, each with an accelerator."""
        return self.tensor * self.pipeline

    @property
    def host_taken(self) -> int:
        """Bytes of the host that are for neither weights nor adapters."""
        return self.staging + (0 if self.pools else RESPONSES)

    @property
    def ranks_per_node(self) -> int:
        """Those of each node."""
        return self.ranks // self.nodes


class Verdict(enum.StrEnum):
    """Whether the requested configuration fits."""

    FITS = "Fits"
    FEWER = "FitsFewer"  # the longest request fits, but not max_num_seqs of that length at once
    NOTHING = "DoesNotFit"


@dataclass(frozen=True, kw_only=True)
class StageBudget:
    """Bytes of the memory of one rank of a stage. ``room``: for the KV cache."""

    layers: int
    weights: int
    workspace: int  # estimated
    kv_per_token: int
    room: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of the accelerator's memory: of each one, where several share the layers; of the stage that has
    room for the fewest tokens, where there are several ``stages``.
    """

    verdict: Verdict
    usable: int
    weights: int
    workspace: int  # estimated
    kv_per_token: int
    kv_wanted: int  # for all sequences at their longest
    longest: int  # context that fits for a single sequence; 0 = none
    concurrency: int  # sequences of the requested length that fit at once
    stages: tuple[StageBudget, ...] = ()  # empty where there is one
    adapters: int = 0  # places for LoRA adapters


def weight_bytes(parameters: int, bits: float = 16) -> int:
    """Of weights with so many bits each; scales of quantized ones add 0.1 to 0.5 bits each."""
    return round(parameters * bits / 8)


def held_bits(model: ModelShape, serving: Serving) -> float:
    """The bits in which an accelerator holds each weight: more than are stored where it has no kernel for the
    format.
    """
    return max(serving.weight_bits, _DEQUANTIZED_BITS) if model.dequantized else serving.weight_bits


def format_advice(model: ModelShape, serving: Serving) -> tuple[str, ...]:
    """What follows from the format of the weights, with the remedy."""
    if held_bits(model, serving) == serving.weight_bits:
        return ()
    return (
        f"No kernel of a GPU multiplies the format of these weights: it holds {_DEQUANTIZED_BITS} bits of "
        "each. Take a release of the model in a format that docs/gpu.md lists as stored, or more memory.",
    )


def kv_bytes_per_token(model: ModelShape, bits: int = 16, tensor: int = 1, layers: int | None = None) -> int:
    """Keys and values of one token in so many layers (None: all), on one of ``tensor`` ranks."""
    row = model.head_size * bits // 8 + (_SCALE if bits == 8 else 0)
    return 2 * (layers or model.num_layers) * rank_kv_heads(model, tensor) * row


def adapter_bytes(model: ModelShape, serving: Serving, layers: int | None = None) -> int:
    """Of a LoRA adapter of the highest rank for every matrix, as of each place on one accelerator: the part
    of a rank with so many layers (None: of the stage with the most).
    """
    count = layers or max(stage_layers(model, serving.pipeline))
    numbers = rank_adapted(model, serving.tensor) * count // model.num_layers
    return numbers * serving.max_adapter_rank * serving.adapter_bits // 8


def host_adapters(model: ModelShape, serving: Serving, host_memory: int) -> int:
    """How many such adapters the host has room for, at most: the server counts its processes, too."""
    left = max(0, host_memory - serving.host_weights - serving.host_taken)
    left = left // serving.ranks_per_node // _HOST_SHARE
    each = adapter_bytes(model, serving)
    return min(_MAX_HOST_ADAPTERS, left // each) if each else 0


def exchanges(num_layers: int) -> int:
    """All-reduces of one step: two a layer, and one of the embedding. A gather of the logits follows."""
    return 2 * num_layers + 1


def exchanged_bytes(model: ModelShape, tokens: int, bits: int = 16) -> int:
    """What each rank gives to the all-reduces of a step of so many tokens."""
    return exchanges(model.num_layers) * tokens * model.hidden_size * bits // 8


def longest_sum(model: ModelShape, devices: int, bandwidth: float, weights: float) -> float:
    """Seconds that one all-reduce may take where so many devices that share each layer are to give as many
    tokens as the same devices with a stage of layers each. Both read all weights once in a step; those that
    share layers read at the same time and wait for the sums.
    """
    return weights / bandwidth * (1 - 1 / devices) / exchanges(model.num_layers)


def handed_on_bytes(model: ModelShape, tokens: int, bits: int = 16) -> int:
    """What a rank gives to the next stage in a step of so many tokens, two rows of hidden states each."""
    return 2 * tokens * model.hidden_size * bits // 8


def decode_bound(bandwidth: float, weights: float) -> float:
    """The upper bound of tokens per second of one stream: each token reads all weights once."""
    return bandwidth / weights


def stream_weights(model: ModelShape, serving: Serving) -> int:
    """The bytes that one token reads one after the other: of all stages, and the part of one rank of each."""
    return weight_bytes(rank_parameters(model, serving.tensor), held_bits(model, serving))


def workspace(model: ModelShape, serving: Serving, *, samples: bool = True) -> int:
    """An estimate: the process, the activations of a step (about ten rows of the hidden size per token),
    float32 logits with their copy for sampling, and on several ranks what they exchange: what an all-reduce
    gives and gets, with the buffers that it goes through, what a stage gets, and what it gives in each of the
    steps in flight. ``samples``: whether it has logits: the first stage, which samples, and the last one.
    """
    rows, tokens = 10 if serving.tensor == 1 else 10 + 2, serving.max_num_batched_tokens or STEP_TOKENS
    activations = tokens * model.hidden_size * rows * 2
    process = _CUDA if serving.ranks == 1 else _CUDA + _EXCHANGE
    if serving.pools:
        longest = serving.max_model_len or model.longest
        rows = 10 * model.hidden_size + model.intermediate_size
        return process + max(tokens, longest) * rows * 2
    if serving.pipeline > 1:
        activations += (1 + serving.pipeline) * handed_on_bytes(model, tokens)
    return process + activations + samples * 2 * 4 * serving.max_num_seqs * model.vocab_size


def _on(accelerator: Accelerator, serving: Serving) -> Serving:
    """With the tokens of a step that the server has there."""
    if serving.max_num_batched_tokens is not None:
        return serving
    return replace(serving, max_num_batched_tokens=step_tokens(accelerator.memory))


def step_tokens(memory: int) -> int:
    """The most tokens of a step on an accelerator of so many bytes, where no setting says so."""
    return LARGE_STEP_TOKENS if memory >= LARGE else STEP_TOKENS


def stage_budgets(model: ModelShape, accelerator: Accelerator, serving: Serving) -> tuple[StageBudget, ...]:
    """What a rank of each stage needs, and what remains for its part of the KV cache."""
    usable, found = int(accelerator.memory * serving.utilization), list[StageBudget]()
    serving = _on(accelerator, serving)
    divided = stages(model, serving.pipeline, serving.tensor)
    for index, stage in enumerate(divided):
        weights = weight_bytes(stage.parameters, held_bits(model, serving))
        weights = max(0, weights - serving.host_weights // serving.ranks)
        needed = workspace(model, serving, samples=index in (0, len(divided) - 1))
        places = serving.max_adapters * adapter_bytes(model, serving, stage.layers)
        room = max(0, usable - weights - needed - places)
        if serving.kv_memory is not None:
            room = min(room, serving.kv_memory // serving.ranks)
        found.append(
            StageBudget(
                layers=stage.layers,
                weights=weights,
                workspace=needed,
                kv_per_token=kv_bytes_per_token(model, serving.kv_bits, serving.tensor, stage.layers),
                room=room,
            )
        )
    return tuple(found)


def budget(model: ModelShape, accelerator: Accelerator, serving: Serving) -> Budget:
    """What remains for the KV cache, and what fits into it. Raises SizingError for invalid limits."""
    _check(model, serving)
    wanted = serving.max_model_len or model.longest
    found = stage_budgets(model, accelerator, serving)
    if serving.pools:
        return _without_cache(model, found[0], serving, int(accelerator.memory * serving.utilization))
    # Every stage has a block for each token, so the stage with the fewest decides.
    tightest = min(found, key=lambda stage: (stage.room // stage.kv_per_token, -stage.weights))
    fitting = tightest.room // tightest.kv_per_token
    concurrency = fitting // wanted
    if concurrency >= serving.max_num_seqs:
        verdict = Verdict.FITS
    else:
        verdict = Verdict.FEWER if concurrency else Verdict.NOTHING
    return Budget(
        verdict=verdict,
        usable=int(accelerator.memory * serving.utilization),
        weights=tightest.weights,
        workspace=tightest.workspace,
        kv_per_token=tightest.kv_per_token,
        kv_wanted=tightest.kv_per_token * wanted * serving.max_num_seqs,
        longest=min(fitting, model.longest),
        concurrency=concurrency,
        stages=found if len(found) > 1 else (),
        adapters=serving.max_adapters * adapter_bytes(model, serving, tightest.layers),
    )


def _without_cache(model: ModelShape, stage: StageBudget, serving: Serving, usable: int) -> Budget:
    """Of a model that embeds texts: with its weights and a step, all of its requests fit."""
    fits = stage.weights + stage.workspace <= usable
    return Budget(
        verdict=Verdict.FITS if fits else Verdict.NOTHING,
        usable=usable,
        weights=stage.weights,
        workspace=stage.workspace,
        kv_per_token=0,
        kv_wanted=0,
        longest=model.longest if fits else 0,
        concurrency=serving.max_num_seqs if fits else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a model takes of an accelerator which it does not have alone. `request`: the KV cache of one
    request of the longest length, `requests`: of all that are asked for.
    """

    weights: int
    workspace: int  # estimated
    request: int
    requests: int
    adapters: int = 0

    @property
    def least(self) -> int:
        """With one request."""
        return self.weights + self.adapters + self.workspace + self.request

    @property
    def most(self) -> int:
        """With all requests."""
        return self.weights + self.adapters + self.workspace + self.requests


@dataclass(frozen=True, kw_only=True)
class Together:
    """Whether several models fit one accelerator at the same time. `least`, `most`: the sums of what they
    need."""

    verdict: Verdict
    usable: int
    least: int
    most: int


def need(model: ModelShape, accelerator: Accelerator, serving: Serving) -> Need:
    """What a model on one accelerator needs of it. Raises SizingError for invalid limits."""
    _check(model, serving)
    serving = _on(accelerator, serving)
    longest = (serving.max_model_len or model.longest) * kv_bytes_per_token(model, serving.kv_bits)
    return Need(
        weights=weight_bytes(model.parameters, held_bits(model, serving)),
        workspace=workspace(model, serving),
        request=longest,
        requests=longest * serving.max_num_seqs,
        adapters=serving.max_adapters * adapter_bytes(model, serving),
    )


def fits_together(needs: Sequence[Need], accelerator: Accelerator, serving: Serving) -> Together:
    """Whether the sum of what models need is within what may be used of the accelerator."""
    usable = int(accelerator.memory * serving.utilization)
    least, most = sum(one.least for one in needs), sum(one.most for one in needs)
    verdict = Verdict.FITS if most <= usable else Verdict.FEWER if least <= usable else Verdict.NOTHING
    return Together(verdict=verdict, usable=usable, least=least, most=most)


def advice(serving: Serving, accelerator: Accelerator, *, host_memory: int) -> tuple[str, ...]:
    """Likely mistakes that are not errors, each with its remedy."""
    found = []
    if not _FEW <= serving.utilization <= _MANY:
        found.append(
            f"memoryPercent gives {serving.utilization * 100:g} % of the accelerator's memory: below "
            f"{_FEW * 100:g} some lies idle, above {_MANY * 100:g} a step may fail for want of it. Set a "
            "value between them."
        )
    if serving.max_model_len is None and not serving.pools:
        found.append(
            "maxModelLen is not set, so the model's own limit holds: set the longest prompt and answer that "
            "you serve, and more requests fit."
        )
    if serving.tensor > 1 and accelerator.interconnect == "PCIe":
        found.append(
            f"The {serving.tensor} ranks add up their results twice a layer, and PCIe alone connects their "
            "accelerators: that is often slower than one of them. Set parallelism.tensor to 1 if the model "
            "fits one, or choose accelerators that NVLink or the like connects."
        )
    if serving.ranks_per_node % serving.tensor:
        found.append(
            f"Ranks that share layers are on several nodes ({serving.ranks_per_node} accelerators on each of "
            f"{serving.nodes}) and add up their results over the network twice a layer, which makes steps "
            "slow. Set parallelism.pipeline to the number of nodes, or a multiple of it, and tensor to the "
            "accelerators of a node: hidden states alone cross the network then."
        )
    if serving.max_num_seqs < serving.pipeline:
        found.append(
            f"With {serving.max_num_seqs} requests at once some of {serving.pipeline} stages are always "
            "idle, since a request is in one of them at a time. Raise maxNumSeqs or take fewer stages."
        )
    if host_memory - serving.host_taken < accelerator.memory:
        found.append(
            "The memory of the container, without what stages KV blocks and keeps responses, is below that "
            "of its accelerator: weights pass through it while they are loaded. Raise resources.memory."
        )
    return tuple(found)


def adapter_advice(model: ModelShape, serving: Serving, *, host_memory: int) -> tuple[str, ...]:
    """The same of LoRA adapters, which are kept on the host."""
    fitting = host_adapters(model, serving, host_memory)
    if fitting >= serving.max_adapters or not model.adapted_size:  # of which an earlier operator kept nothing
        return ()
    return (
        f"The host has room for {fitting} adapters of rank {serving.max_adapter_rank} for every matrix, in a "
        f"quarter of its memory, and the accelerator for {serving.max_adapters}. Raise resources.memory, or "
        "lower maxAdapterRank.",
    )


def staged_tokens(model: ModelShape, serving: Serving) -> int:
    """How many tokens fit into the memory for KV blocks between pods. Heads that several ranks have are there
    as often.
    """
    copies = max(1, serving.tensor * rank_kv_heads(model, serving.tensor) // model.num_kv_heads)
    return serving.staging // (copies * kv_bytes_per_token(model, serving.kv_bits))


def _check(model: ModelShape, serving: Serving) -> None:
    if serving.max_model_len is not None and not 0 < serving.max_model_len <= model.longest:
        raise SizingError(
            f"maxModelLen is {serving.max_model_len}; give 1 to {model.longest}, what the model was made for."
        )
    if serving.tensor != 1:
        check_tensor(model, serving.tensor)
    check_pipeline(model, serving.pipeline)
    if serving.nodes < 1 or serving.ranks % serving.nodes:
        raise SizingError(
            f"{serving.ranks} accelerators cannot be spread over {serving.nodes} nodes; give a number that "
            "divides tensor times pipeline."
        )
    if serving.max_adapters and serving.pools:
        raise SizingError("A model that embeds texts has no adapters: leave out max-adapters.")
    if not (serving.max_adapters >= 0 and serving.max_adapter_rank > 0):
        raise SizingError("max-adapters has to be 0 or more, and max-adapter-rank 1 or more.")
    if serving.max_num_seqs < 1:
        raise SizingError(f"maxNumSeqs is {serving.max_num_seqs}; give 1 or more.")
    if not 0 < serving.weight_bits <= _MAX_BITS:
        raise SizingError(
            f"weight-bits is {serving.weight_bits:g}; give 16, 8 or 4, and {_MAX_BITS} at most."
        )
    if not 0 < serving.utilization <= 1:
        raise SizingError(
            f"gpu-memory-utilization is {serving.utilization:g}; give a share above 0, up to 1."
        )
