"""Which steps a captured graph computes, and how large it is. Called by ``runner.device_steps``.

A graph is the same launches over the same memory, so its batch has a fixed size; a smaller batch is padded.
The more sizes, the less padding, and the longer the capture. How many parts a sequence's attention is split
into follows from the size, so it is constant within a graph, too. Pure arithmetic.
"""

from collections.abc import Sequence

from quire_server.core.step import Step

Shape = tuple[int, int]  # sequences, and tokens of each: more than one where drafts are verified

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_STEP, _LARGEST = 64, 512  # beyond, kernels take so long that launching them one by one costs nothing


def sizes(max_rows: int) -> tuple[int, ...]:
    """The sizes to capture, largest first, so that the smaller ones find all their memory in the pool.

    Each fits into the largest; every batch of so many rows, up to a bound, has one.
    """
    largest = min(max_rows, _LARGEST)
    known = (*_SIZES, *range(_SIZES[-1] + _STEP, _LARGEST + 1, _STEP))
    return (largest, *(size for size in reversed(known) if size < largest))


def shapes(max_rows: int, num_drafts: int) -> tuple[Shape, ...]:
    """All to capture, those of most tokens first: decodes, and sequences of up to ``num_drafts`` drafts."""
    tokens = 1 + num_drafts
    found = [(size, 1) for size in sizes(max_rows)]
    if num_drafts:
        found += [(size, tokens) for size in sizes(max_rows) if size * tokens <= _LARGEST]
    return tuple(sorted(found, key=lambda shape: shape[0] * shape[1], reverse=True))


def shape_for(counts: Sequence[int], captured: Sequence[Shape]) -> Shape | None:
    """The captured shape of fewest tokens that holds sequences of so many tokens each; None: it is to be
    computed eagerly. In one of single tokens each draft is a sequence of its own, which reads all keys again:
    of equals it is the last choice.
    """
    longest, together = max(counts), sum(counts)
    fitting = [
        shape
        for shape in captured
        if shape[0] >= (together if shape[1] == 1 else len(counts)) and (shape[1] == 1 or shape[1] >= longest)
    ]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], -shape[1]), default=None)


def eager_shape(counts: Sequence[int]) -> Shape:
    """Without a graph nothing is padded: as many tokens for all, or single ones."""
    return (len(counts), counts[0]) if len(set(counts)) == 1 else (sum(counts), 1)


def is_uniform(step: Step) -> bool:
    """Whether a token is sampled at every position: decodes, and drafts to be verified, which are decodes
    of the same sequence at different lengths.
    """
    return bool(step.rows) and step.num_tokens == step.samples
