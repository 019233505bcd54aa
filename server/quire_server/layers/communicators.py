"""Which communicator the ranks of a model use: rank 0 chooses, and sends the others its name and the
descriptor of what they share.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.layers.parallel import (
    Communicator,
    Gloo,
    GpuStages,
    Meeting,
    Nccl,
    SingleRank,
    Stages,
    check_gpus,
)
from quire_server.layers.shared_memory import SharedMemory

SHARED_MEMORY, GLOO, NCCL = "shared-memory", "gloo", "nccl"


def choose(nodes: int = 1, *, is_gpu: bool = False) -> str:
    """The name of the fastest communicator that this machine supports, and that reaches so many nodes.
    ``is_gpu``: for ranks on GPUs.
    """
    if is_gpu:
        return NCCL
    return SHARED_MEMORY if nodes == 1 and SharedMemory.is_supported() else GLOO


@contextmanager
def shared(name: str, topology: Topology) -> Iterator[tuple[int | None, ...]]:
    """For each stage, the descriptor that its ranks need to join, if they do need one. Open within the
    context.
    """
    if name != SHARED_MEMORY or topology.tensor == 1:
        yield (None,) * topology.pipeline
        return
    with ExitStack() as opened:
        descriptors = []
        for _ in range(topology.pipeline):
            descriptors.append(SharedMemory.create(topology.tensor))
            opened.callback(os.close, descriptors[-1])
        yield tuple(descriptors)


def join(name: str, topology: Topology, meeting: Meeting, descriptor: int | None) -> Communicator:
    """Join the other ranks at their meeting place, with the descriptor of their stage from ``shared``."""
    if name == NCCL:
        check_gpus(topology, meeting, _gpu(topology))
    of_stage: Communicator = SingleRank()
    if topology.tensor > 1:
        of_stage = _join_stage(name, topology, meeting, descriptor)
    if topology.pipeline == 1:
        return of_stage
    if name == NCCL:
        return GpuStages(of_stage, topology, meeting, _gpu(topology))
    return Stages(of_stage, topology, meeting)


def _join_stage(name: str, topology: Topology, meeting: Meeting, descriptor: int | None) -> Communicator:
    if name == GLOO:
        return Gloo(topology, meeting)
    if name == SHARED_MEMORY and descriptor is not None:
        return SharedMemory(descriptor, topology.tensor_rank)
    if name == NCCL:
        return Nccl.join(topology, meeting, _gpu(topology))
    raise ConfigError(f"There is no communicator {name!r}.")


def _gpu(topology: Topology) -> torch.device:
    return torch.device("cuda", topology.local_rank)
