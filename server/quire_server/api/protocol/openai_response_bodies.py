"""The bodies of OpenAI's Responses, as /openapi.json describes them; see `responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire_server.api.protocol.responses import Count, ResponseModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Text = Annotated[str, Field(description="What was written so far.")]


class OutputText(ResponseModel):
    """A part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: Annotated[list[Any], Field(max_length=0)]


class ReasoningText(ResponseModel):
    """A part of a thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseModel):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(ResponseModel):
    """What the model thought before."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningText]


class OutputCall(ResponseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[str, Field(description="A JSON object.")]


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(ResponseModel):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, Field(ge=0, description="Found in the prefix cache.")]
    cache_write_tokens: Annotated[int, Field(description="Not counted: 0.")]


class OutputDetails(ResponseModel):
    """Of the answer's tokens."""

    reasoning_tokens: Annotated[
        int, Field(ge=0, description="Those of thoughts, with the tokens that begin and end them.")
    ]


class ResponseUsage(ResponseModel):
    """Token counts."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseFailure(ResponseModel):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(ResponseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseBody(ResponseModel):
    """The response of /v1/responses. Much of it repeats the request."""

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    usage: ResponseUsage | None


class ResponseEvent(ResponseModel):
    """What all events of a stream have."""

    sequence_number: Count


class LifecycleEvent(ResponseEvent):
    """The response as it begins, and as it ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseBody


class ItemEvent(ResponseEvent):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Count
    item: OutputItem


class WithinItem(ResponseEvent):
    """What is about one item."""

    item_id: str
    output_index: Count


class PartEvent(WithinItem):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Count
    part: OutputText | ReasoningText


class TextDeltaEvent(WithinItem):
    """More of a text."""

    type: Literal["response.output_text.delta"]
    content_index: Count
    delta: str
    logprobs: Annotated[list[Any], Field(max_length=0)]


class TextDoneEvent(WithinItem):
    """A text is whole."""

    type: Literal["response.output_text.done"]
    content_index: Count
    text: str
    logprobs: Annotated[list[Any], Field(max_length=0)]


class ReasoningDeltaEvent(WithinItem):
    """More of a thought."""

    type: Literal["response.reasoning_text.delta"]
    content_index: Count
    delta: str


class ReasoningDoneEvent(WithinItem):
    """A thought is whole."""

    type: Literal["response.reasoning_text.done"]
    content_index: Count
    text: str


class ArgumentsDeltaEvent(WithinItem):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(WithinItem):
    """Arguments are whole."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


RESPONSE_EVENTS = (
    LifecycleEvent,
    ItemEvent,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
)


class InputText(ResponseModel):
    """A text of the user's, or of the system's."""

    type: Literal["input_text"]
    text: str


class InputMessageItem(ResponseModel):
    """What was said."""

    id: str
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user", "assistant", "system"]
    content: list[InputText | OutputText]


class InputCallOutput(ResponseModel):
    """What a call gave back."""

    id: str
    type: Literal["function_call_output"]
    status: Literal["completed"]
    call_id: str
    output: str


class InputItemList(ResponseModel):
    """A page of the items that a response was asked with, those of earlier responses included."""

    object: Literal["list"]
    data: list[InputMessageItem | OutputReasoning | OutputCall | InputCallOutput]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(ResponseModel):
    """The answer to DELETE."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
