"""When a step needs more memory than there is: it is computed again without its largest row, which fails.

Called by `model_runner`. Nothing that a step writes before it fails is wrong for the second one: keys and
values are written again at the same places, and a token depends on its row's seed and position only. So the
other rows of the step get exactly what they would have got.
"""

import dataclasses
import logging
from collections.abc import Callable

import torch

from quire_server.core.step import OUT_OF_MEMORY, Step, StepResult

logger = logging.getLogger(__name__)


Pending = Callable[[], StepResult]  # waits for it, where the device is still busy


def launch(step: Step, start: Callable[[Step], Pending]) -> Pending:
    """The result of a step, with failures for as many rows as had to go: memory is asked for when a step
    starts, and not while the device computes it.
    """
    if not step.rows:
        return lambda: StepResult(step.step_id, ())
    try:
        return start(step)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here, where no traceback holds the failed step's tensors any longer, is their memory free.
    index = largest(step)
    logger.error("out of memory in a step", extra={"rows": len(step.rows), "tokens": step.total_tokens})
    wait = launch(without(step, index), start)
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
    """torch raises any RuntimeError for the host's allocator."""
    is_hosts = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return is_hosts or is_devices(error)


def is_devices(error: Exception) -> bool:
    """torch raises a class of its own for what it allocates, and others what CUDA, its libraries and Triton
    say of what they do.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error).splitlines()[0] if isinstance(error, RuntimeError) and str(error) else ""
    return "CUBLAS_STATUS_ALLOC_FAILED" in said or ("CUDA" in said and "out of memory" in said)


def largest(step: Step) -> int:
    """The row with most tokens in this step; of several, the one with the longest context."""
    return max(range(len(step.rows)), key=lambda i: (step.num_tokens[i], step.starts[i], i))


def without(step: Step, index: int) -> Step:
    """The same step for all rows but one."""
    return dataclasses.replace(
        step,
        rows=step.rows[:index] + step.rows[index + 1 :],
        starts=step.starts[:index] + step.starts[index + 1 :],
        num_tokens=step.num_tokens[:index] + step.num_tokens[index + 1 :],
        samples=step.samples[:index] + step.samples[index + 1 :],
    )
