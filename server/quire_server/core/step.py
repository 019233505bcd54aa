"""The interface between scheduler and model runner: a Step goes in, a StepResult comes out.

A Step is a *difference*. The runner keeps one row per running request (its tokens, block table and sampling
parameters), so the size of a decode step does not depend on the context length. Everything is plain ints,
strings and tuples, ready for a wire format; nothing here knows tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quire_server.core.request import FinishReason, PoolingParams
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.stats import Timing


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A request takes a row: all that the runner needs to know of it. Sent once, and again after a
    preemption.
    """

    row: int
    request_id: str
    token_ids: tuple[int, ...]  # the prompt, and tokens generated before a preemption
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # blocks for all of token_ids; the first ones may hold a cached prefix
    sampling: SamplingParams
    seed: int
    pooling: PoolingParams | None = None
    adapter_slot: int = -1  # of the adapter that computes it; -1: none


@dataclass(frozen=True, slots=True)
class Copies:
    """KV blocks to copy before the forward pass, as pairs (from, to), in the order of the fields: a host slot
    is spilled before it is overwritten, and a block is saved before another one is loaded over it.
    """

    spills: tuple[tuple[int, int], ...]  # host slot -> disk slot, in the background
    saves: tuple[tuple[int, int], ...]  # block -> host slot
    loads: tuple[tuple[int, int], ...]  # host slot -> block, read by rows of this step
    fetches: tuple[tuple[int, int], ...]  # disk slot -> host slot, in the background


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """The outcome of this step's copies, and of earlier ones that ran in the background."""

    failed: tuple[int, ...] = ()  # blocks that a load of this step could not fill
    arrived: tuple[int, ...] = ()  # host slots that a fetch has filled
    missed: tuple[int, ...] = ()  # host slots that a fetch could not fill
    lost: tuple[int, ...] = ()  # disk slots that a spill could not fill
    disk_failed: bool = False  # the disk tier is switched off: all its content is lost


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. Decodes come first, then rows with drafts, then prefill chunks, so that the rows
    which sample at every token are a slice.

    Drafts are tokens after a row's newest one, to be verified: with k of them a row computes and samples 1 +
    k. Where the draft model has to propose them, ``draft_requests`` says how many; it may propose fewer.
    """

    step_id: int
    started: tuple[StartedRow, ...]
    new_blocks: tuple[tuple[int, int], ...]  # (row, block id to append to its block table)
    rows: tuple[int, ...]
    starts: tuple[int, ...]  # position of the first token that each row computes
    num_tokens: tuple[int, ...]
    samples: tuple[int, ...]  # number of last tokens of the row at which to sample; 0 within a prompt
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, tokens)
    draft_requests: tuple[tuple[int, int], ...] = ()  # (row, number of tokens)
    copies: Copies | None = None
    adapter_loads: tuple[tuple[int, int], ...] = ()  # (slot, number of the adapter to copy there before)

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_tokens)

    @property
    def has_only_decodes(self) -> bool:
        """Whether each row computes and samples one token."""
        return self.num_tokens == self.samples == (1,) * len(self.rows)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the raw distribution (before temperature, top-k and the like)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner sampled: ``samples`` tokens for each row, in the Step's order, or 1 + the number of
    drafts that the draft model proposed.
    """

    step_id: int
    token_ids: tuple[int, ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by row, where requested
    failures: Mapping[int, str] = field(default_factory=dict)  # by row: the error of a row without a token
    copied: CopyOutcome | None = None  # None: no copy has ended
    # By row, where requested: of the prompt token after each computed position, in order.
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, tokens) that the draft model proposed
    draft_seconds: float = 0.0  # time of the draft model; 0 = no measurement
    pooled: Mapping[int, bytes] = field(default_factory=dict)  # by row: the vector, f32 little-endian


#: The error of a row that is dropped so that its step fits into memory.
OUT_OF_MEMORY = (
    "The server had no memory left for the step that computes this request and others, and this was the "
    "largest of them: send a shorter prompt, or try again later."
)
#: The logits contain NaN or infinity. The row's KV cache may contain them too.
NOT_FINITE = "The model computed no finite number for the next token."
#: Errors whose cause may be the engine: its weights, its device, its memory.
ENGINE_FAILURES = frozenset({OUT_OF_MEMORY, NOT_FINITE})
#: Errors that follow from the constraints of the request itself: what was computed for it is correct.
NOTHING_ALLOWED = (
    "Every token is excluded at this point of the answer by what the request allows, bans and asks for "
    "(allowed_token_ids, bad_words, min_tokens, its grammar): allow more, or ban less."
)
GRAMMAR_TOO_COMPLEX = "The grammar is too complex at this point of the answer: send a simpler one."
#: The adapter was dropped between the API process and the engine.
ADAPTER_GONE = "The adapter that the request names as its model is not loaded any more."
UNSATISFIABLE = frozenset({NOTHING_ALLOWED, GRAMMAR_TOO_COMPLEX})


class TokenEvent(NamedTuple):
    """The result of one step for one request. A NamedTuple, because it is 3x cheaper to make than a
    dataclass.

    With ``finish_reason`` stop, the last token id is the stop token, which does not belong to the text.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0  # of the prompt; set in the last event, maybe before
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of its next tokens; the first prompt token has none
    timing: Timing | None = None  # in the first and the last event
    pooled: bytes = b""  # the vector of a pooling request, f32 little-endian


def failure_event(request_id: str, message: str) -> TokenEvent:
    """The event that ends one request with an error."""
    return TokenEvent(request_id, (), finish_reason=FinishReason.ERROR, error=message)


class StepEvents:
    """The result of one step. Plain tokens (without logprobs or a finish reason) are two columns, as in the
    message to the API process: an object for each token would double the cost of scheduling. Iterating yields
    an event for each token, then ``events``.
    """

    __slots__ = ("events", "request_ids", "token_ids")

    def __init__(self, request_ids: list[str], token_ids: list[int], events: list[TokenEvent]) -> None:
        self.request_ids = request_ids
        self.token_ids = token_ids  # one for each request id
        self.events = events

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.events)

    def __iter__(self) -> Iterator[TokenEvent]:
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield TokenEvent(request_id, (token_id,))
        yield from self.events
