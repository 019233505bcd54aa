"""The bodies of responses, as /openapi.json describes them.

The server writes the bodies of completions without these models, for speed (see `api.response_formatter`);
tests validate what it writes against them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """An object of a response: it has all of its required fields, and no field that is not declared."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class ErrorDetail(ResponseModel):
    """OpenAI's error."""

    message: Annotated[str, Field(description="What is wrong, and what to do.")]
    type: str
    param: Annotated[str | None, Field(description="The field of the request.")]
    code: Annotated[str | None, Field(description="The reason, for programs.")]


class Error(ResponseModel):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    """How much of the prompt was in the prefix cache."""

    cached_tokens: Count


class CompletionTokensDetails(ResponseModel):
    """What the tokens of the answers are."""

    reasoning_tokens: Annotated[
        int, Field(ge=1, description="Those of thoughts, with the tokens that begin and end them.")
    ]


class Usage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenTiming(ResponseModel):
    """When each token was generated; only with the header `x-quire-token-timing`."""

    token_ms: Annotated[list[float], Field(description="Milliseconds since the arrival of the request.")]


class TokenLogprob(ResponseModel):
    """The log-probability of one token."""

    token: str
    logprob: float
    bytes: list[Count]


class ChosenTokenLogprob(TokenLogprob):
    """The log-probability of a token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat's answer."""

    content: list[ChosenTokenLogprob]
    refusal: None


class PromptLogprob(ResponseModel):
    """vLLM's log-probability of a token of the prompt."""

    logprob: float
    rank: Annotated[int | None, Field(description="Only of the likeliest tokens.")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Field(description="By token id, for each position of the prompt; null for the first."),
]


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of a text, in the shape of /v1/completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class Choice(ResponseModel):
    """What all answers have."""

    index: Count
    stop_reason: Annotated[
        str | int | None, Field(description="The stop string or stop token of the request that ended it.")
    ] = None
    quire_timing: TokenTiming | None = None


class CalledFunction(ResponseModel):
    """What is called."""

    name: str
    arguments: Annotated[str, Field(description="A JSON object.")]


class ToolCall(ResponseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ResponseModel):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="Null where there are only calls.")]
    reasoning_content: Annotated[str, Field(description="What the model thought before.")] | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None


class ChatChoice(Choice):
    """One answer of a chat."""

    finish_reason: ChatFinishReason | None
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(ResponseModel):
    """The name comes first, with empty arguments; then more of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """What a call gained; its first one has its id."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseModel):
    """What a chunk adds to an answer; empty in the last one."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    """One answer's part of a chunk."""

    finish_reason: ChatFinishReason | None
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    """One text, or its part of a chunk."""

    finish_reason: FinishReason | None
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionBody(ResponseModel):
    """What all completions have."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


class ChatCompletion(CompletionBody):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(CompletionBody):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Completion(CompletionBody):
    """The response of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(CompletionBody):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: Literal["quire"] = "quire"
    max_model_len: Annotated[int | None, Field(description="Null while the model is loading.")]
    parent: Annotated[
        str | None, Field(description="Of a LoRA adapter, the model that it adapts; null of the model.")
    ] = None


class Models(ResponseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class PromptUsage(ResponseModel):
    """Token counts of a request without an answer in text."""

    prompt_tokens: Count
    total_tokens: Count


class Embedding(ResponseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[list[float] | str, Field(description="Numbers, or their bytes in base64.")]


class Embeddings(ResponseModel):
    """The response of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PromptUsage


class PooledData(ResponseModel):
    """The vector of one input."""

    object: Literal["pooling"]
    index: Count
    data: Annotated[list[float] | str, Field(description="Numbers, or their bytes in base64.")]


class Pooled(ResponseModel):
    """The response of /pooling."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[PooledData]
    usage: PromptUsage


class RankedText(ResponseModel):
    """A document."""

    text: str


class RankedDocument(ResponseModel):
    """One document, the best first."""

    index: Annotated[Count, Field(description="Its place in the request.")]
    relevance_score: float
    document: RankedText | None = None


class Ranking(ResponseModel):
    """The response of /v1/rerank."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class PairScore(ResponseModel):
    """The score of one pair."""

    index: Count
    object: Literal["score"]
    score: float


class Scores(ResponseModel):
    """The response of /v1/score."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[PairScore]
    usage: PromptUsage


class Tokens(ResponseModel):
    """The response of /tokenize."""

    count: Count
    max_model_len: int | None
    tokens: list[Count]


class Text(ResponseModel):
    """The response of /detokenize."""

    prompt: str


class Version(ResponseModel):
    """The server's version."""

    version: str


class Empty(ResponseModel):
    """An empty object."""


class Health(ResponseModel):
    """The response of /health."""

    status: Literal["healthy", "degraded"]
    checks: dict[str, bool | None]
    numbers: dict[str, dict[str, bool | int | float | str | None]]
    version: str
