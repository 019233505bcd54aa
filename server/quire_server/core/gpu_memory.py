"""How much of a GPU's memory the KV cache gets: what is left of the share that this server may use, after the
weights, the largest step and the graphs. Called by ``runner.gpu_setup`` with what was measured.

Pure arithmetic; where nothing fits, the error names the smallest change that would.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.core.errors import ConfigError
from quire_server.core.graph_buckets import Shape

_MOST = 0.98  # of a GPU's memory: the driver takes some for itself
_MIB = 1 << 20
_EACH_GRAPH = 32 * _MIB  # launches and their arguments


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one GPU: all there are, and what is taken of them before the KV cache."""

    total: int
    others: int  # other processes, and what CUDA takes for this one
    weights: int
    workspace: int  # at the peak of the largest step that the limits allow
    graphs: int  # set aside for captured graphs

    @property
    def taken(self) -> int:
        """All but the total."""
        return self.others + self.weights + self.workspace + self.graphs


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the cache is for. ``longest`` is what the user insists on, None: whatever fits."""

    block_bytes: int
    block_size: int
    longest: int | None
    useful_blocks: int  # more than all sequences at full length is of no use


def graph_bytes(peak: int, shapes: Sequence[Shape], token_bytes: int) -> int:
    """What captured graphs take. They share the memory of the largest, whose ``peak`` it is; each of the
    others keeps the logits that it leaves to the sampler, ``token_bytes`` for each of its tokens.
    """
    tokens = [sequences * count for sequences, count in shapes]
    return peak + (sum(tokens) - max(tokens)) * token_bytes + len(shapes) * _EACH_GRAPH


def num_blocks(measured: Measured, utilization: float, wanted: Wanted) -> int:
    """KV blocks that fit into ``utilization`` of the GPU's memory. Raises ConfigError where none does, or
    not the longest context.
    """
    room = int(measured.total * utilization) - measured.taken
    fitting = max(0, room) // wanted.block_bytes
    needed = 1 if wanted.longest is None else -(-wanted.longest // wanted.block_size)
    if fitting < needed:
        raise ConfigError(_why(measured, utilization, wanted, needed, fitting))
    return min(fitting, wanted.useful_blocks)


def _why(measured: Measured, utilization: float, wanted: Wanted, needed: int, fitting: int) -> str:
    lacking = needed * wanted.block_bytes + measured.taken - int(measured.total * utilization)
    return (
        f"The KV cache needs {_mib(needed * wanted.block_bytes)} MiB and lacks {_mib(lacking)} MiB: of "
        f"{_mib(measured.total)} MiB and a share of {utilization:g}, weights take {_mib(measured.weights)}, "
        f"a step {_mib(measured.workspace)}, graphs {_mib(measured.graphs)} and others "
        f"{_mib(measured.others)} MiB. {_remedy(measured, wanted, needed, fitting, lacking)}"
    )


def _remedy(measured: Measured, wanted: Wanted, needed: int, fitting: int, lacking: int) -> str:
    """The first that suffices, from what costs nothing to what costs most."""
    share = math.ceil((measured.taken + needed * wanted.block_bytes) / measured.total * 100) / 100
    if share <= _MOST:
        return f"Raise --gpu-memory-utilization to {share:g}."
    if fitting:
        return f"Lower --max-model-len to {fitting * wanted.block_size}."
    if lacking <= measured.graphs:
        return "Set --enforce-eager, which needs no graphs."
    if lacking < measured.workspace:
        return "Lower --max-num-batched-tokens, with which the memory of a step grows."
    if lacking <= measured.others:
        return "End what else uses this GPU."
    whole = math.ceil((measured.taken + needed * wanted.block_bytes) / _MOST / (1 << 30))
    return f"Take a GPU with {whole} GiB, or a checkpoint of the model that is quantised."


def _mib(size: int) -> int:
    return -(-size // _MIB)
