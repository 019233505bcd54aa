"""Whether a request can ever run here. Called by the scheduler, on arrival and when blocks run out."""

from quire_server.core.limits import SchedulerConfig
from quire_server.core.request import Request


def refusal(request: Request, config: SchedulerConfig) -> str | None:
    """Why this request could never run, or None."""
    length = len(request.prompt_token_ids)
    if length == 0:
        return "The prompt is empty."
    if request.sampling.max_tokens < 1:
        return "max_tokens must be at least 1."
    if length >= config.max_model_len:
        return (
            f"The prompt has {length} tokens; with a context of {config.max_model_len} tokens "
            f"it may have {config.max_model_len - 1}. Shorten it."
        )
    needed = -(-(length + 1) // config.block_size)
    return too_long(needed, config) if needed > config.num_blocks else None


def too_long(num_blocks: int, config: SchedulerConfig) -> str:
    """Says that a request needs more blocks than there are."""
    return (
        f"The request needs {num_blocks * config.block_size} tokens of KV cache, and the whole cache holds "
        f"{config.num_blocks * config.block_size}. Shorten it, or give the server more KV cache."
    )
