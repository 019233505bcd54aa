"""A client's request in the form that the engine works with: token ids in, token ids out.

Built by the API process, which converts text to token ids and back, and never changed. What changes while a
request runs is in ``core.sequence``.
"""

from dataclasses import dataclass
from enum import StrEnum

from quire_server.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. ``stop`` and ``length`` are OpenAI's values."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Asks for a vector in place of an answer. ``dimensions``: how many of its first components are kept (0:
    all). ``second_text_at``: the token from which on the prompt is the second text of a pair (0: it is one
    text).
    """

    dimensions: int = 0
    second_text_at: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and one answer. ``arrival``: seconds of the machine's monotonic clock; ``priority``: lower
    goes first, 0 is normal (see ``core.policy``).

    ``cache_salt`` separates prefix caches: only requests with the same salt share cached blocks.
    ``cache_ttl``: how many seconds after the request the blocks of its prompt are kept from eviction.
    ``client``: whose request it is; its pinned blocks are counted. Empty without API keys.
    ``external_id``: the HTTP request's `x-request-id`, for log lines. Clients choose it, so several requests
    may have the same one.
    ``adapter``: the name of the LoRA adapter that computes it; empty: the model itself.
    ``output_token_ids``: what another server has generated of the answer; it goes on after these tokens, and
    events do not repeat them.
    ``pooling``: for a model that embeds texts and generates none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    cache_ttl: float = 0.0
    client: str = ""
    external_id: str = ""
    output_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    adapter: str = ""
