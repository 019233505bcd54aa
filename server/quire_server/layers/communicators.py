"""Which communicator the ranks of a model use: rank 0 chooses, and the others are told its name."""

from pathlib import Path

from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.layers.parallel import Communicator, Gloo


def choose() -> str:
    """The name of the fastest communicator that this machine supports."""
    return "gloo"


def join(name: str, topology: Topology, directory: Path) -> Communicator:
    """Join the other ranks, which share the directory."""
    if name == "gloo":
        return Gloo(topology, directory)
    raise ConfigError(f"There is no communicator {name!r}.")
