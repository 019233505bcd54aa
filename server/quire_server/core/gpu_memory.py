"""How many KV blocks fit into a GPU: the share of its memory that this server may use, less the weights, the
workspace of the largest step, and the CUDA graphs.

Pure arithmetic on measured sizes. Where the cache does not fit, the error names the smallest change that
helps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.core.cuda_graph_shapes import Shape
from quire_server.errors import ConfigError

_MOST = 0.98  # share of a GPU's memory: the driver needs some itself
_MIB = 1 << 20
_EACH_GRAPH = 32 * _MIB  # kernel launches and their arguments


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of one GPU: its size, and what is used before the KV cache is allocated."""

    total: int
    others: int  # other processes, and the CUDA context of this one
    weights: int
    workspace: int  # at the peak of the largest step that the limits allow
    graphs: int  # reserved for captured graphs

    @property
    def taken(self) -> int:
        """Bytes in use."""
        return self.others + self.weights + self.workspace + self.graphs


@dataclass(frozen=True, slots=True)
class KVCacheRequirements:
    """What the cache has to hold. ``longest``: the context length that the user asked for; None: what
    fits.
    """

    block_bytes: int
    block_size: int
    longest: int | None
    useful_blocks: int  # enough for all sequences at full length


def graph_bytes(peak: int, shapes: Sequence[Shape], token_bytes: int) -> int:
    """Memory of the captured graphs. They share the memory of the largest one, ``peak``; each other graph
    also keeps its logits for the sampler, ``token_bytes`` for each of its tokens.
    """
    tokens = [sequences * count for sequences, count in shapes]
    return peak + (sum(tokens) - max(tokens)) * token_bytes + len(shapes) * _EACH_GRAPH


def num_blocks(usage: MemoryUsage, utilization: float, required: KVCacheRequirements) -> int:
    """KV blocks that fit into the share ``utilization`` of the GPU's memory. Raises ConfigError where no
    block fits, or not enough for the longest context.
    """
    room = int(usage.total * utilization) - usage.taken
    fitting = max(0, room) // required.block_bytes
    needed = 1 if required.longest is None else -(-required.longest // required.block_size)
    if fitting < needed:
        raise ConfigError(_error_text(usage, utilization, required, needed, fitting))
    return min(fitting, required.useful_blocks)


def _error_text(
    usage: MemoryUsage, utilization: float, required: KVCacheRequirements, needed: int, fitting: int
) -> str:
    lacking = needed * required.block_bytes + usage.taken - int(usage.total * utilization)
    return (
        f"The KV cache needs {_mib(needed * required.block_bytes)} MiB and lacks {_mib(lacking)} MiB: of "
        f"{_mib(usage.total)} MiB and a share of {utilization:g}, weights take {_mib(usage.weights)}, "
        f"a step {_mib(usage.workspace)}, graphs {_mib(usage.graphs)} and others "
        f"{_mib(usage.others)} MiB. {_remedy(usage, required, needed, fitting, lacking)}"
    )


def _remedy(
    usage: MemoryUsage, required: KVCacheRequirements, needed: int, fitting: int, lacking: int
) -> str:
    """The first change that suffices, from the cheapest to the most expensive."""
    share = math.ceil((usage.taken + needed * required.block_bytes) / usage.total * 100) / 100
    if share <= _MOST:
        return f"Raise --gpu-memory-utilization to {share:g}."
    if fitting:
        return f"Lower --max-model-len to {fitting * required.block_size}."
    if lacking <= usage.graphs:
        return "Set --enforce-eager, which needs no graphs."
    if lacking < usage.workspace:
        return "Lower --max-num-batched-tokens, with which the memory of a step grows."
    if lacking <= usage.others:
        return "End what else uses this GPU."
    whole = math.ceil((usage.taken + needed * required.block_bytes) / _MOST / (1 << 30))
    return f"Take a GPU with {whole} GiB, or a checkpoint of the model that is quantised."


def _mib(size: int) -> int:
    return -(-size // _MIB)
