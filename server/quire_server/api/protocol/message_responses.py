"""The bodies of Anthropic's responses, as /openapi.json describes them; see `responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire_server.api.protocol.responses import Count, ResponseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesErrorDetail(ResponseModel):
    """Anthropic's error; `param` and `code` are ours."""

    type: str
    message: Annotated[str, Field(description="What is wrong, and what to do.")]
    param: Annotated[str | None, Field(description="The field of the request.")]
    code: Annotated[str | None, Field(description="The reason, for programs.")]


class MessagesError(ResponseModel):
    """The body of every error, and the data of an event that ends a stream too early."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessageUsage(ResponseModel):
    """Token counts. The prompt's are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: Count
    cache_creation_input_tokens: Annotated[int, Field(description="Not counted: 0.")]
    cache_read_input_tokens: Annotated[int, Field(ge=0, description="Found in the prefix cache.")]
    output_tokens: Count


class AnsweredText(ResponseModel):
    """A text."""

    type: Literal["text"]
    text: str


class AnsweredThinking(ResponseModel):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Literal[""], Field(description="Nothing is signed.")]


class AnsweredToolUse(ResponseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], Field(description="Empty where the answer ended within it.")]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


class Message(ResponseModel):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(ResponseModel):
    """The first event: the message without content."""

    type: Literal["message_start"]
    message: Message


class ContentBlockStart(ResponseModel):
    """A block begins, without its text."""

    type: Literal["content_block_start"]
    index: Count
    content_block: AnsweredBlock


class TextDelta(ResponseModel):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseModel):
    """More of a thought."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(ResponseModel):
    """More of the arguments of a call, as text."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(ResponseModel):
    """What the open block gains."""

    type: Literal["content_block_delta"]
    index: Count
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(ResponseModel):
    """The open block ends."""

    type: Literal["content_block_stop"]
    index: Count


class MessageEnding(ResponseModel):
    """Why it ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(ResponseModel):
    """The answer ends."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(ResponseModel):
    """The last event."""

    type: Literal["message_stop"]


MESSAGE_EVENTS = (
    MessageStart,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
)


class MessageTokens(ResponseModel):
    """The response of /v1/messages/count_tokens."""

    input_tokens: Count
