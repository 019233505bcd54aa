"""Which steps a captured graph computes, and how large it is. Called by ``runner.decode_graphs``.

A graph is the same launches over the same memory, so its batch has a fixed size; a smaller batch is padded.
The more sizes, the less padding, and the longer the capture. How many parts a sequence's attention is split
into follows from the size, so it is constant within a graph, too. Pure arithmetic.
"""

from quire_server.core.step import Step

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_STEP, _LARGEST = 64, 512  # beyond, kernels take so long that launching them one by one costs nothing


def sizes(max_rows: int) -> tuple[int, ...]:
    """The sizes to capture, largest first, so that the smaller ones find all their memory in the pool.

    Each fits into the largest; every batch of so many rows, up to a bound, has one.
    """
    largest = min(max_rows, _LARGEST)
    known = (*_SIZES, *range(_SIZES[-1] + _STEP, _LARGEST + 1, _STEP))
    return (largest, *(size for size in reversed(known) if size < largest))


def size_for(num_entries: int, captured: tuple[int, ...]) -> int | None:
    """The smallest captured size that holds so many; None: it is to be computed eagerly."""
    return min((size for size in captured if size >= num_entries), default=None)


def is_uniform(step: Step) -> bool:
    """Whether a token is sampled at every position: decodes, and drafts to be verified, which are decodes
    of the same sequence at different lengths.
    """
    return bool(step.rows) and step.num_tokens == step.samples
