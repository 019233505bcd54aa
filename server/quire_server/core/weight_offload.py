"""Which layers' weights stay in the host's memory where a GPU's is too small for all. Called by
``runner.weight_stream`` and the bench of GPUs. Pure arithmetic.
"""

from collections.abc import Sequence

from quire_server.core.errors import ConfigError

BUFFERS = 2  # of a layer's size, on the GPU: one is read while the other is filled
_GIB = 1 << 30


def streamed_layers(sizes: Sequence[int], room: float) -> tuple[int, ...]:
    """The layers, of so many bytes each, whose weights stay on the host: as many as ``room`` GiB hold, with
    as many others as possible between two of them, which give the copies time.

    Raises ConfigError where no memory of the GPU would be saved.
    """
    largest = max(sizes)
    count = min(len(sizes), int(room * _GIB) // largest)
    if count <= BUFFERS:
        enough = _ceiled(largest * (BUFFERS + 1))
        raise ConfigError(
            f"--cpu-offload-gb {room:g} holds {count} of {len(sizes)} layers, and saves nothing, since "
            f"{BUFFERS} are on the GPU at any time: "
            + (f"give at least {enough:g}." if len(sizes) > BUFFERS else "drop it, the model has no more.")
        )
    return tuple((number + 1) * len(sizes) // count - 1 for number in range(count))


def _ceiled(size: int) -> float:
    """GiB, of which three digits behind the point are enough."""
    return -(-size * 1000 // _GIB) / 1000
