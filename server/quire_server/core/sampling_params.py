"""How an answer is sampled: the one declaration of every sampling parameter.

Each parameter that a request may set carries its bounds, its description and whether a model's
generation_config.json may set its default. The request model of the API, the reader of generation_config.json
and the documentation are derived from these declarations, so that they cannot differ. Knows nothing of JSON,
of HTTP or of tensors.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated

INT64_MAX = 2**63 - 1


class GrammarKind(StrEnum):
    """The kinds of structured output, under vLLM's names, and calls of tools."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    TOOLS = "tools"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar that constrains an answer. ``text`` is compiled: ``text.grammar`` writes and reads it."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How long an answer may think: after so many tokens its thought is ended. ``begin_token_id``: begins the
    thought in the answer, None where the prompt has begun it.
    """

    max_tokens: int
    end_token_id: int
    begin_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class RequestField:
    """A sampling parameter as a request may set it. ``low`` and ``high`` bound a number, both inclusive
    unless ``above_low``; ``min_items`` and ``max_items`` bound a list of token ids.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    above_low: bool = False
    min_items: int = 0
    max_items: int | None = None
    model_default: bool = False  # generation_config.json may set the default


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop. docs/sampling.md gives the order of application.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repetition_penalty`` 1 are off.
    Penalties are OpenAI's (presence, frequency: over the answer so far) and CTRL's (repetition: over prompt
    and answer). Stop strings are matched by the API process, which has the text; the engine knows ids only.
    ``logprobs`` n = the chosen token's and the n likeliest ones'; ``prompt_logprobs`` the same of each prompt
    token but the first.
    """

    max_tokens: int
    temperature: Annotated[float, RequestField("0 takes the likeliest token.", 0, 2, model_default=True)] = (
        1.0
    )
    top_k: Annotated[
        int,
        RequestField(
            "Only so many of the likeliest tokens; 0 and -1: all.", -1, INT64_MAX, model_default=True
        ),
    ] = 0
    top_p: Annotated[
        float,
        RequestField(
            "Only the likeliest tokens that together have this probability.",
            0,
            1,
            above_low=True,
            model_default=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        RequestField(
            "Only tokens with at least this fraction of the likeliest token's probability.",
            0,
            1,
            model_default=True,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        RequestField("The same seed gives the same answer, whatever the batch.", -INT64_MAX - 1, INT64_MAX),
    ] = None
    presence_penalty: Annotated[
        float, RequestField("Subtracted from the logits of tokens that the answer has.", -2, 2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, RequestField("The same, once for each time that the answer has the token.", -2, 2)
    ] = 0.0
    repetition_penalty: Annotated[  # nearer to 0, logits become infinite
        float,
        RequestField(
            "Divides the logits of tokens that prompt or answer have.", 0.01, 10, model_default=True
        ),
    ] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: Annotated[  # empty: all are
        tuple[int, ...], RequestField("Only these tokens.", min_items=1, max_items=4096)
    ] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the answer shall not contain
    watermark: bool = False
    stop_token_ids: Annotated[tuple[int, ...], RequestField("Tokens that end the answer.", max_items=64)] = ()
    ignore_eos: Annotated[bool, RequestField("Whether the model's end token is ignored.")] = False
    min_tokens: Annotated[int, RequestField("The shortest answer, in tokens.", 0, INT64_MAX)] = 0
    logprobs: int | None = None
    prompt_logprobs: Annotated[
        int | None,
        RequestField("How many of the likeliest tokens to list at each position of the prompt.", 0, 20),
    ] = None
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None

    @property
    def named_token_ids(self) -> list[int]:
        """Every token id in here that becomes an index."""
        biased = [token_id for token_id, _ in self.logit_bias]
        banned = [token_id for word in self.bad_words for token_id in word]
        ends = [] if self.thinking is None else [self.thinking.end_token_id]
        return [*biased, *banned, *self.allowed_token_ids, *ends]

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before the temperature, other than by ``min_tokens``."""
        return self.penalises or self.edits_logits

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed by more than penalties."""
        edited = self.logit_bias or self.allowed_token_ids or self.bad_words
        return self.watermark or self.thinking is not None or bool(edited)

    @property
    def edits_by_answer(self) -> bool:
        """Whether these changes depend on the tokens of the answer."""
        return self.watermark or self.thinking is not None or bool(self.bad_words)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One parameter that a request may set: its name, its type without annotation, default and bounds."""

    name: str
    kind: object
    default: object
    field: RequestField


def declarations() -> tuple[Declaration, ...]:
    """Every parameter that a request may set, in the order of SamplingParams."""
    hints = typing.get_type_hints(SamplingParams, include_extras=True)
    return tuple(
        Declaration(one.name, typing.get_args(hints[one.name])[0], one.default, metadata)
        for one in fields(SamplingParams)
        for metadata in getattr(hints[one.name], "__metadata__", ())
    )
