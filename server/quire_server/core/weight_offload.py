"""Which layers' weights stay in host memory when the GPU's memory is too small for all. Pure arithmetic."""

from collections.abc import Sequence

from quire_server.errors import ConfigError

BUFFERS = 2  # on the GPU, each of a layer's size: one is read while the other is filled
_GIB = 1 << 30


def streamed_layers(sizes: Sequence[int], room: float, stages: int = 1) -> tuple[int, ...]:
    """The layers (of ``sizes`` bytes each) whose weights stay on the host: as many as ``room`` GiB hold,
    evenly spaced, so that each copy has the most time. ``stages``: that have equal parts of the room; the
    sizes are those of one of them.

    Raises ConfigError where that would save no GPU memory.
    """
    largest = max(sizes)
    count = min(len(sizes), int(room * _GIB) // stages // largest)
    if count <= BUFFERS:
        enough = _gib_rounded_up(largest * (BUFFERS + 1) * stages)
        of_stage = " of a stage" if stages > 1 else ""
        raise ConfigError(
            f"--cpu-offload-gb {room:g} holds {count} of {len(sizes)} layers{of_stage}, and saves nothing, "
            f"since {BUFFERS} are on the GPU at any time: "
            + (f"give at least {enough:g}." if len(sizes) > BUFFERS else "drop it, the model has no more.")
        )
    return tuple((number + 1) * len(sizes) // count - 1 for number in range(count))


def _gib_rounded_up(size: int) -> float:
    """GiB with three decimals."""
    return -(-size * 1000 // _GIB) / 1000
