"""The bodies of the routes of a model that embeds texts, in OpenAI's, Cohere's and vLLM's shapes.

Pure: no tokenizer, no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from quire_http.errors import bad_field
from quire_server.api.protocol.generation import MAX_NAME
from quire_server.api.protocol.requests import CHARACTERS_PER_TOKEN, PromptList, Prompts
from quire_server.api.protocol.validation import Boolean, Integer, OneOf, RequestModel, Strings, Text

#: Inputs of one request, as OpenAI has it.
MAX_INPUTS = 2048
MAX_CHARACTERS = 1 << 24
MAX_DIMENSIONS = 1 << 17
MAX_TRUNCATION = 1 << 24
#: Of all pairs of one request: a long query stands in each of up to 2,048.
MAX_PAIR_TOKENS = 1 << 21
_NAME = Field(description="A name from /v1/models.")
_TRUNCATE = Field(
    description="Keep so many tokens of a longer input, from its beginning; -1: as many as the model takes."
)
_USER = Field(description="For the client's own records.")


class EmbeddingRequest(RequestModel):
    """The body of /v1/embeddings and of /pooling."""

    model: Annotated[str, Text(MAX_NAME, required=True), _NAME]
    input: Annotated[
        Prompts,
        PromptList(MAX_INPUTS),
        Field(description=f"A text, a list of token ids, or a list of up to {MAX_INPUTS} of either."),
    ]
    encoding_format: Annotated[
        str,
        OneOf(("float", "base64")),
        Field(description="A list of numbers, or their bytes (float32, little-endian) in base64."),
    ] = "float"
    dimensions: Annotated[
        int | None,
        Integer(1, MAX_DIMENSIONS),
        Field(description="Keep so many of a vector's first numbers, and scale them to length 1 again."),
    ] = None
    truncate_prompt_tokens: Annotated[int | None, Integer(-1, MAX_TRUNCATION), _TRUNCATE] = None
    user: Annotated[str, Text(MAX_NAME), _USER] = ""

    @property
    def texts(self) -> Prompts:
        """All inputs."""
        return self.input


class RerankRequest(RequestModel):
    """The body of /v1/rerank."""

    model: Annotated[str, Text(MAX_NAME, required=True), _NAME]
    query: Annotated[str, Text(MAX_CHARACTERS, required=True), Field(description="What is looked for.")]
    documents: Annotated[
        tuple[str, ...],
        Strings(MAX_INPUTS, MAX_CHARACTERS),
        Field(description=f"Up to {MAX_INPUTS} texts."),
    ]
    top_n: Annotated[
        int | None, Integer(0, MAX_INPUTS), Field(description="How many of the best to list; 0: all.")
    ] = None
    return_documents: Annotated[
        bool, Boolean(), Field(description="Whether the results have the texts, too.")
    ] = True
    truncate_prompt_tokens: Annotated[int | None, Integer(-1, MAX_TRUNCATION), _TRUNCATE] = None
    user: Annotated[str, Text(MAX_NAME), _USER] = ""

    @property
    def texts(self) -> Prompts:
        """All inputs."""
        return (self.query, *self.documents)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What a cross-encoder scores."""
        return [(self.query, document) for document in self.documents]


class ScoreRequest(RequestModel):
    """The body of /v1/score."""

    model: Annotated[str, Text(MAX_NAME, required=True), _NAME]
    text_1: Annotated[
        tuple[str, ...],
        Strings(MAX_INPUTS, MAX_CHARACTERS),
        Field(description="The first text of each pair; one stands for all."),
    ]
    text_2: Annotated[
        tuple[str, ...],
        Strings(MAX_INPUTS, MAX_CHARACTERS),
        Field(description="The second text of each pair."),
    ]
    truncate_prompt_tokens: Annotated[int | None, Integer(-1, MAX_TRUNCATION), _TRUNCATE] = None
    user: Annotated[str, Text(MAX_NAME), _USER] = ""

    @property
    def texts(self) -> Prompts:
        """All inputs."""
        return (*self.text_1, *self.text_2)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What is scored. Raises ApiError where the lists do not pair."""
        if len(self.text_1) not in (1, len(self.text_2)):
            raise bad_field(
                "text_1", f"has {len(self.text_1)} texts and text_2 {len(self.text_2)}; give one, or as many"
            )
        firsts = self.text_1 * (len(self.text_2) if len(self.text_1) == 1 else 1)
        return list(zip(firsts, self.text_2, strict=True))


PoolingCall = EmbeddingRequest | RerankRequest | ScoreRequest


def estimated_tokens(call: PoolingCall, longest: int, *, are_paired: bool) -> int:
    """Of all inputs, estimated by characters: nothing is tokenised yet. ``are_paired``: a cross-encoder reads
    pairs, each of up to ``longest`` tokens. Raises ApiError where that is more than it may be.
    """
    if isinstance(call, EmbeddingRequest) or not are_paired:
        return sum(map(_estimated, call.texts))
    return check_pairs((_estimated(one) + _estimated(other) for one, other in call.pairs), longest, call)


def check_pairs(lengths: Iterable[int], longest: int, call: RerankRequest | ScoreRequest) -> int:
    """The tokens of pairs of these lengths, of which each has at most ``longest``. Raises ApiError where they
    are too many.
    """
    tokens = sum(min(length, longest) for length in lengths)
    if tokens > MAX_PAIR_TOKENS:
        field = "documents" if isinstance(call, RerankRequest) else "text_2"
        raise bad_field(
            field,
            f"about {tokens} tokens in all pairs, each with its first text, are more than {MAX_PAIR_TOKENS}: "
            "send fewer at once, or shorter texts",
        )
    return tokens


def _estimated(text: str | tuple[int, ...]) -> int:
    return len(text) // CHARACTERS_PER_TOKEN if isinstance(text, str) else len(text)
