"""How many requests and tokens a step has where no setting says so, by what computes.

A GPU reads its weights once for all requests of a step, so more of them cost little; a large one computes
thousands of tokens of a prompt while it would read the weights a few times. The operator, the gateway and the
sizing tool assume the same numbers (tests/contracts compares them). Pure arithmetic.
"""

from typing import NamedTuple

LARGE_GPU = 64 << 30  # bytes: A100 80 GB, H100, H200


class StepLimits(NamedTuple):
    """The most requests, and the most tokens."""

    requests: int
    tokens: int


ON_CPU = StepLimits(64, 512)
ON_GPU = StepLimits(256, 2048)
ON_LARGE_GPU = StepLimits(256, 8192)


def of_device(gpu_memory: int | None) -> StepLimits:
    """``gpu_memory``: bytes of the GPU that computes; None: a CPU does."""
    if gpu_memory is None:
        return ON_CPU
    return ON_LARGE_GPU if gpu_memory >= LARGE_GPU else ON_GPU


def limits(requests: int | None, tokens: int | None, default: StepLimits) -> StepLimits:
    """What is set, and else the default: at least one token for each request, and at most as many requests as
    the tokens that are set.
    """
    if requests is None:
        requests = default.requests if tokens is None else min(default.requests, tokens)
    return StepLimits(requests, tokens or max(default.tokens, requests))
