"""The axes of the parity matrix, and the cases that it runs: every possible pair of values in few cases.

``test_parity_matrix`` runs it and docs/generate.py publishes it. Has no tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.topology import tensor_sizes
from tests.server.models.variants import SIZES, VARIANTS

Case = Mapping[str, str]

# The scheduler's settings for each value.
CHUNK: dict[str, dict[str, object]] = {
    "whole prompts": {"enable_chunked_prefill": False},
    "chunks of 32": {"max_num_batched_tokens": 32},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 3": {"max_num_batched_tokens": 3},
}
PREFIX: dict[str, dict[str, object]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "prefix miss": {},
    "prefix hit": {},
}
_TIGHT: dict[str, object] = {"num_blocks": 6, "max_model_len": 96}
PREEMPTION: dict[str, dict[str, object]] = {
    "no preemption": {},
    "preemption, recomputed": _TIGHT,
    "preemption, swapped": _TIGHT | {"preemption_mode": PreemptionMode.SWAP, "num_host_slots": 32},
}
BATCH: dict[str, dict[str, object]] = {
    "1 request": {"max_num_seqs": 1},
    "3 requests": {"max_num_seqs": 3},
    "8 requests": {"max_num_seqs": 8},
}
SPECULATION: dict[str, dict[str, object]] = {
    "no drafts": {},
    "drafts from the prompt": {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)},
    "drafts of a draft model": {"speculation": SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 3)},
}
RANKS: dict[str, int] = {"1 rank": 1, "2 ranks": 2, "4 ranks": 4}

AXES: dict[str, tuple[str, ...]] = {
    "family": tuple(VARIANTS),
    "chunk": tuple(CHUNK),
    "prefix": tuple(PREFIX),
    "preemption": tuple(PREEMPTION),
    "batch": tuple(BATCH),
    "speculation": tuple(SPECULATION),
    "ranks": tuple(RANKS),
}


def is_possible(case: Case) -> bool:
    """A single request is never preempted, and a family's heads and experts divide among few ranks."""
    if "family" in case and "ranks" in case and RANKS[case["ranks"]] not in ranks_of(case["family"]):
        return False
    return case.get("preemption", "no preemption") == "no preemption" or case.get("batch") != "1 request"


def ranks_of(variant: str) -> tuple[int, ...]:
    """The numbers of ranks that a variant can be divided among."""
    sizes = SIZES | VARIANTS[variant][1]
    experts = [sizes[name] for name in ("num_experts", "num_local_experts") if name in sizes]
    dimensions = [sizes["intermediate_size"], *experts]
    return tensor_sizes(sizes["num_attention_heads"], sizes["num_key_value_heads"], dimensions)


def settings(case: Case) -> dict[str, object]:
    """Settings of the scheduler."""
    return (
        CHUNK[case["chunk"]]
        | PREFIX[case["prefix"]]
        | PREEMPTION[case["preemption"]]
        | BATCH[case["batch"]]
        | SPECULATION[case["speculation"]]
    )


def pairwise(
    axes: Mapping[str, Sequence[str]] = AXES, is_possible: Callable[[Case], bool] = is_possible
) -> list[dict[str, str]]:
    """Cases that cover every possible pair, chosen greedily: each starts from a missing pair and takes the
    values that cover most missing pairs. The same axes always give the same cases.
    """
    missing = dict.fromkeys(
        pair
        for one, other in combinations(sorted(axes), 2)
        for a in axes[one]
        for b in axes[other]
        if is_possible(dict(pair := ((one, a), (other, b))))
    )
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for axis, values in axes.items():
            if axis not in case:
                options = [case | {axis: value} for value in values if is_possible(case | {axis: value})]
                case = max(options, key=lambda option: sum(pair in missing for pair in pairs(option)))
        cases.append({axis: case[axis] for axis in axes})
        for pair in pairs(case):
            missing.pop(pair, None)
    return cases


def pairs(case: Case) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of (axis, value) that a case covers."""
    return combinations(sorted(case.items()), 2)
