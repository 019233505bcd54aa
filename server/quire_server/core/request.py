"""What a client asked for, as the engine sees it: token ids in, token ids out.

Built by the API process (text is its business), carried to the engine, never changed. What changes while a
request runs lives in ``core.sequence``.
"""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. ``stop`` and ``length`` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarKind(StrEnum):
    """What a client may describe an answer by: vLLM's words."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer has to look like. ``text`` is compiled: ``text.grammar`` wrote and reads it."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off. Stop strings are matched by the API
    process (it has the text); the engine knows ids only. ``logprobs`` n = the chosen token's and the n
    likeliest ones'.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and one answer. ``arrival``: seconds of the machine's monotonic clock; ``priority``: lower
    goes first, 0 is normal (see ``core.policy``).

    ``cache_salt`` separates prefix caches: requests share cached blocks only under the same salt.
    ``cache_ttl``: seconds after its end for which the prompt's blocks are kept from eviction.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    cache_ttl: float = 0.0
