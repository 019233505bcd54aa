"""Which steps compile every kernel that serving launches, before the first request comes.

A kernel is compiled once for each way in which it is launched, for seconds, and all requests wait meanwhile.
The ways depend on how many tokens, decodes and blocks a step has, through powers of two and thresholds; sizes
that grow by at most a half meet each of them. Steps that are replays of graphs compile while these are
captured, so here are those that are launched kernel by kernel. Pure arithmetic.
"""

from collections.abc import Iterable
from dataclasses import replace

from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import StartedRow, Step

_ENOUGH = 512  # with more tokens in a step than this, only the largest number of them
_CHUNK = 2  # tokens of the shortest part of a prompt that is no decode
_PLAIN = SamplingParams(1, temperature=1.0)
_ALL_ON_DEVICE = replace(_PLAIN, top_k=2, top_p=0.5, min_p=0.5, repetition_penalty=1.5)


def sizes(most: int) -> tuple[int, ...]:
    """From 1 to ``most``, each at most half larger than the one before: 1, 2, 3, 4, 6, 8, 12 and so on."""
    powers = [1 << power for power in range(most.bit_length())]
    found = {size for power in powers for size in (power, power + power // 2) if size <= most}
    return tuple(sorted(found | {most}))


def steps(
    max_rows: int, max_tokens: int, max_len: int, block_size: int, num_drafts: int, *, has_graphs: bool
) -> tuple[Step, ...]:
    """Steps of a batch with so many rows, each up to ``max_len`` tokens long and with up to ``num_drafts``
    drafts. Nothing that they compute is of use; all keys and values go to the first block.
    """
    most = min(max_tokens, max_rows * max_len)
    alone = sorted({*sizes(min(most, _ENOUGH)), most})
    found = [_step((), _parts(size, max_len), block_size, max_len) for size in alone]
    budget = max_tokens - _CHUNK
    if max_rows > 1 and budget > 0 and max_len > _CHUNK:
        for size in sizes(min((max_rows - 1) * (1 + num_drafts), budget)):
            counts = _drafted(size, max_rows - 1, num_drafts)
            found.append(_step(counts, (_CHUNK,), block_size, max_len))
        for blocks in sizes(-(-max_len // block_size)):
            found.append(_step((1,), (_CHUNK,), block_size, min(blocks * block_size, max_len)))
    if not has_graphs:
        for size in sizes(min(max_rows, max_tokens)):
            found.append(_step((1,) * size, (), block_size, max_len))
            if num_drafts and size * (1 + num_drafts) <= max_tokens and num_drafts < max_len:
                found.append(_step((1 + num_drafts,) * size, (), block_size, max_len))
    return tuple(found)


def _parts(tokens: int, max_len: int) -> tuple[int, ...]:
    """Prompts that together have so many tokens."""
    whole, rest = divmod(tokens, max_len)
    return (max_len,) * whole + ((rest,) if rest else ())


def _drafted(tokens: int, max_rows: int, num_drafts: int) -> tuple[int, ...]:
    """So many tokens as decodes, with drafts where there are not rows enough."""
    rows = min(tokens, max_rows)
    drafts = tokens - rows
    return tuple(1 + min(num_drafts, max(0, drafts - row * num_drafts)) for row in range(rows))


def _step(decodes: Iterable[int], chunks: Iterable[int], block_size: int, longest: int) -> Step:
    """Rows that are sampled at each of their tokens, then rows that are sampled at the last one. The first
    row is as long as ``longest`` allows, which makes block tables so wide; the others begin with this step.
    """
    decoded = tuple(decodes)
    counts = (*decoded, *chunks)
    starts = [max(0, longest - counts[0]) if decoded else 0, *([0] * (len(counts) - 1))]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    sampling = _ALL_ON_DEVICE if decoded else _PLAIN
    started = tuple(
        StartedRow(row, "", (0,) * end, end, (0,) * -(-end // block_size), sampling, 0)
        for row, end in enumerate(ends)
    )
    return Step(
        step_id=0,
        started=started,
        new_blocks=(),
        rows=tuple(range(len(counts))),
        starts=tuple(starts),
        num_tokens=counts,
        samples=(*decoded, *(1 for _ in range(len(counts) - len(decoded)))),
    )
