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
    """How to choose the next token, and when to stop. docs/sampling.md says in which order it is applied.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repetition_penalty`` 1 are off.
    Penalties are OpenAI's (presence, frequency: over the answer so far) and CTRL's (repetition: over prompt
    and answer). Stop strings are matched by the API process (it has the text); the engine knows ids only.
    ``logprobs`` n = the chosen token's and the n likeliest ones'; ``prompt_logprobs`` the same of each prompt
    token but the first.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # none: all are
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the answer shall not contain
    watermark: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def named_token_ids(self) -> list[int]:
        """Every token id in here that becomes an index."""
        biased = [token_id for token_id, _ in self.logit_bias]
        banned = [token_id for word in self.bad_words for token_id in word]
        return [*biased, *banned, *self.allowed_token_ids]

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before the temperature, beyond what ``min_tokens`` asks for."""
        return self.penalises or self.edits_logits

    @property
    def penalises(self) -> bool:
        """Whether what was said before loses."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether they are changed by more than penalties."""
        return self.watermark or bool(self.logit_bias or self.allowed_token_ids or self.bad_words)


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
