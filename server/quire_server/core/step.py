"""The seam between deciding and computing: the scheduler emits a Step, the runner answers with a StepResult.

A Step is a *difference*: the runner keeps one row per running request (its tokens, block table and sampling
parameters), so a decode step names rows and nothing else, whatever the context length. Everything in here
is plain ints, strings and tuples, ready for a wire format; nothing in here knows tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quire_server.core.request import FinishReason, SamplingParams
from quire_server.core.timing import Timing


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A request takes a row: everything the runner has to know about it, once (again after a preemption)."""

    row: int
    request_id: str
    token_ids: tuple[int, ...]  # prompt, and what was generated before a preemption
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # blocks for all of token_ids; the first ones may hold a cached prefix
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Copies:
    """KV blocks that move before the forward pass, as pairs (from, to), in the order of the fields: a host
    slot is spilled before it is overwritten, and a block is saved before another one is loaded over it.
    """

    spills: tuple[tuple[int, int], ...]  # host slot -> disk slot, in the background
    saves: tuple[tuple[int, int], ...]  # block -> host slot
    loads: tuple[tuple[int, int], ...]  # host slot -> block, which rows of this step read
    fetches: tuple[tuple[int, int], ...]  # disk slot -> host slot, in the background


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """What became of copies: of this step's, and of earlier ones that ran in the background."""

    failed: tuple[int, ...] = ()  # blocks of this step's loads that did not get their content
    arrived: tuple[int, ...] = ()  # host slots that a fetch has filled
    missed: tuple[int, ...] = ()  # host slots that a fetch could not fill
    lost: tuple[int, ...] = ()  # disk slots that did not get their content
    disk_failed: bool = False  # the disk is given up: it holds nothing any more


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. Rows that lack a single token come first, then those with drafts, then chunks of
    prompts: the rows all of whose tokens are sampled are a slice.

    Drafts are the tokens after a row's newest, to be checked: with k of them a row computes and samples 1 +
    k. Where the draft model has to find them, ``wishes`` says how many; it may find fewer.
    """

    step_id: int
    started: tuple[StartedRow, ...]
    grown: tuple[tuple[int, int], ...]  # (row, block id appended to its table)
    rows: tuple[int, ...]
    starts: tuple[int, ...]  # position of the first token that each row computes
    num_tokens: tuple[int, ...]
    samples: tuple[int, ...]  # at how many of the row's last tokens a next one is sampled; 0 within a prompt
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, tokens)
    wishes: tuple[tuple[int, int], ...] = ()  # (row, number of tokens)
    copies: Copies | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_tokens)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the model's own distribution (before temperature and cuts)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner sampled: ``samples`` entries for each row, in the Step's order, or 1 + the number of
    drafts that the draft model found.
    """

    step_id: int
    token_ids: tuple[int, ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by row, where asked for
    failures: Mapping[int, str] = field(default_factory=dict)  # by row: why no token could be sampled
    copied: CopyOutcome | None = None  # None: nothing to say
    # By row, where asked for: of the prompt token after each position that was computed, in order.
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, tokens) that were checked
    draft_seconds: float = 0.0  # that the draft model took for them; 0 = not to be learnt from


#: The failure of a row that is given up so that its step fits into memory.
OUT_OF_MEMORY = (
    "The server had no memory left for the step that computes this request and others, and this was the "
    "largest of them: send a shorter prompt, or try again later."
)
#: Failures that a request has brought upon itself: nothing that was computed for it is wrong.
NOTHING_ALLOWED = (
    "Every token is excluded at this point of the answer by what the request allows, bans and asks for "
    "(allowed_token_ids, bad_words, min_tokens, its grammar): allow more, or ban less."
)
GRAMMAR_TOO_COMPLEX = "The grammar is too complex at this point of the answer: send a simpler one."
IMPOSSIBLE = frozenset({NOTHING_ALLOWED, GRAMMAR_TOO_COMPLEX})


class TokenEvent(NamedTuple):
    """What happened to one request in one step. A NamedTuple: one is made per token, and it is 3x cheaper.

    With ``finish_reason`` stop the last token id is the stop token itself, which is no part of the text.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0  # of the prompt; the last event has it, those before may
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of its next tokens, the first one left out
    timing: Timing | None = None  # of the first and the last event


def failure(request_id: str, message: str) -> TokenEvent:
    """The event of a request that fails alone."""
    return TokenEvent(request_id, (), finish_reason=FinishReason.ERROR, error=message)


class StepEvents:
    """What happened in one step. Tokens about which there is nothing else to say are two columns, as they
    travel: an object for each would cost as much as deciding the step. Iterating gives an event for each.
    """

    __slots__ = ("others", "request_ids", "token_ids")

    def __init__(self, request_ids: list[str], token_ids: list[int], others: list[TokenEvent]) -> None:
        self.request_ids = request_ids
        self.token_ids = token_ids  # one for each request id
        self.others = others

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[TokenEvent]:
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield TokenEvent(request_id, (token_id,))
        yield from self.others
