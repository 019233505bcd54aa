"""Which communicator the ranks of a model use: rank 0 chooses, and sends the others its name and the
descriptor of what they share.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.layers.parallel import Communicator, Gloo
from quire_server.layers.shared_memory import SharedMemory

SHARED_MEMORY, GLOO = "shared-memory", "gloo"


def choose() -> str:
    """The name of the fastest communicator that this machine supports."""
    return SHARED_MEMORY if SharedMemory.is_supported() else GLOO


@contextmanager
def shared(name: str, topology: Topology) -> Iterator[int | None]:
    """The descriptor that every rank needs to join, if it does need one. Open within the context."""
    if name != SHARED_MEMORY:
        yield None
        return
    descriptor = SharedMemory.create(topology.tensor)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def join(name: str, topology: Topology, directory: Path, descriptor: int | None) -> Communicator:
    """Join the other ranks, which share the directory and the descriptor of ``shared``."""
    if name == GLOO:
        return Gloo(topology, directory)
    if name == SHARED_MEMORY and descriptor is not None:
        return SharedMemory(descriptor, topology.rank)
    raise ConfigError(f"There is no communicator {name!r}.")
