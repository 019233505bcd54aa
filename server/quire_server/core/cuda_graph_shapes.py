"""Which batch shapes are captured as CUDA graphs, and which captured shape fits a step.

A graph repeats the same kernel launches over the same memory, so its batch size is fixed and a smaller batch
is padded. More sizes mean less padding and a longer capture. The number of splits of a sequence's attention
follows from the size, so it is constant within a graph. Pure arithmetic.
"""

from collections.abc import Sequence

from quire_server.core.step import Step

Shape = tuple[int, int]  # (sequences, tokens of each): more than one token where drafts are verified

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_STEP, _LARGEST = 64, 512  # in larger batches kernels take so long that launch overhead does not matter
# Keys that the tokens of prompts may read one by one. Of Llama 3.1 8B it is 256 MiB a layer: 0.06 ms at 4.8
# TB/s, where launching the layer's kernels takes 0.1 ms or more. Reckoned, not measured.
_MOST_KEYS = 1 << 16


def sizes(max_rows: int) -> tuple[int, ...]:
    """The batch sizes to capture, largest first, so that the smaller graphs reuse the memory of the largest
    one.

    Every batch of up to ``max_rows`` rows, within a bound, fits into one of them.
    """
    largest = min(max_rows, _LARGEST)
    known = (*_SIZES, *range(_SIZES[-1] + _STEP, _LARGEST + 1, _STEP))
    return (largest, *(size for size in reversed(known) if size < largest))


def shapes(max_rows: int, num_drafts: int) -> tuple[Shape, ...]:
    """All shapes to capture, most tokens first: decodes, and sequences with up to ``num_drafts`` drafts."""
    tokens = 1 + num_drafts
    found = [(size, 1) for size in sizes(max_rows)]
    if num_drafts:
        found += [(size, tokens) for size in sizes(max_rows) if size * tokens <= _LARGEST]
    return tuple(sorted(found, key=lambda shape: shape[0] * shape[1], reverse=True))


def shape_for(counts: Sequence[int], captured: Sequence[Shape]) -> Shape | None:
    """The captured shape with the fewest tokens that holds sequences of so many tokens each; None: compute
    the step eagerly. In a shape of single tokens each draft is a sequence of its own and reads all keys
    again, so it is the last choice among equals.
    """
    longest, together = max(counts), sum(counts)
    fitting = [
        shape
        for shape in captured
        if shape[0] >= (together if shape[1] == 1 else len(counts)) and (shape[1] == 1 or shape[1] >= longest)
    ]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], -shape[1]), default=None)


def eager_shape(counts: Sequence[int], num_drafts: int) -> Shape:
    """The shape without a graph: sequences with up to ``num_drafts`` drafts, padded to the most, or single
    tokens. With other numbers of tokens the kernels would be compiled for each.
    """
    together = (sum(counts), 1)
    return shape_for(counts, ((len(counts), 1 + num_drafts), together)) or together


def is_small(step: Step) -> bool:
    """Whether a step with parts of prompts may be computed by a graph of decodes: each token is a sequence of
    its own then, and reads all keys before it by itself.
    """
    parts = zip(step.starts, step.num_tokens, step.samples, strict=True)
    read = sum(
        count * start + count * (count + 1) // 2 for start, count, samples in parts if count != samples
    )
    return bool(step.rows) and step.total_tokens <= _LARGEST and read <= _MOST_KEYS


def is_uniform(step: Step) -> bool:
    """Whether a token is sampled at every position: only decodes, and drafts to be verified, which are
    computed as decodes of the same sequence at different lengths.
    """
    return bool(step.rows) and step.num_tokens == step.samples
