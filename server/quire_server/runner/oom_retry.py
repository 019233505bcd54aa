"""Recovers from out of memory in a step: computes the step again without its largest row, which fails.

A retry is safe: the failed attempt wrote keys and values to the same slots that the retry writes, and a token
depends only on its row's seed and position. The other rows of the step get exactly the tokens that they would
have got.
"""

import dataclasses
import logging
from collections.abc import Callable

import torch

from quire_server.core.step import OUT_OF_MEMORY, Step, StepResult

logger = logging.getLogger(__name__)


class OutOfMemoryOnRankError(MemoryError):
    """A rank had no memory for a pass; all ranks have ended it."""


Pending = Callable[[], StepResult]  # returns the result, and waits for the device if it is still computing


def launch(step: Step, start: Callable[[Step], Pending], request_id_of: Callable[[int], str]) -> Pending:
    """Start a step; on out of memory, drop its largest row and start again, as often as needed. Dropped rows
    are failures in the result. Memory is allocated when a step starts, not while the device computes it; what
    other ranks lacked is known when its result is awaited. ``request_id_of`` a row, for the log.
    """
    if not step.rows:
        return lambda: StepResult(step.step_id, ())
    try:
        pending = start(step)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return lambda: _awaited(step, pending, start, request_id_of)
    # Retry outside the except block: until it ends, the traceback keeps the failed step's tensors alive.
    return _without_largest(step, start, request_id_of)


def _awaited(
    step: Step, pending: Pending, start: Callable[[Step], Pending], request_id_of: Callable[[int], str]
) -> StepResult:
    try:
        return pending()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return _without_largest(step, start, request_id_of)()


def _without_largest(
    step: Step, start: Callable[[Step], Pending], request_id_of: Callable[[int], str]
) -> Pending:
    index = largest(step)
    facts = {"rows": len(step.rows), "tokens": step.total_tokens, "dropped": request_id_of(step.rows[index])}
    logger.error("out of memory in a step", extra=facts)
    wait = launch(without(step, index), start, request_id_of)
    return lambda: _with_failure(wait(), step, index)


def _with_failure(result: StepResult, step: Step, index: int) -> StepResult:
    place = sum(step.samples[:index])
    nothing = (0,) * step.samples[index]
    return dataclasses.replace(
        result,
        token_ids=(*result.token_ids[:place], *nothing, *result.token_ids[place:]),
        failures={**result.failures, step.rows[index]: OUT_OF_MEMORY},
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory. For the host's allocator torch raises a plain
    RuntimeError.
    """
    is_host_out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return is_host_out_of_memory or is_device_out_of_memory(error)


def is_device_out_of_memory(error: Exception) -> bool:
    """Whether the device ran out of memory. torch has a class for its own allocations only; CUDA, its
    libraries and Triton report it in the text of other errors.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error).splitlines()[0] if isinstance(error, RuntimeError) and str(error) else ""
    return "CUBLAS_STATUS_ALLOC_FAILED" in message or ("CUDA" in message and "out of memory" in message)


def largest(step: Step) -> int:
    """Index of the row with the most tokens in this step; among equals, the one with the longest context."""
    return max(range(len(step.rows)), key=lambda i: (step.num_tokens[i], step.starts[i], i))


def without(step: Step, index: int) -> Step:
    """The same step without one row."""
    return dataclasses.replace(
        step,
        rows=step.rows[:index] + step.rows[index + 1 :],
        starts=step.starts[:index] + step.starts[index + 1 :],
        num_tokens=step.num_tokens[:index] + step.num_tokens[index + 1 :],
        samples=step.samples[:index] + step.samples[index + 1 :],
    )
