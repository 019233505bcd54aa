"""The prompt of a chat with tools and thoughts, and what that means for its answer.

A call that has to be made begins in the prompt, so that the model goes on with it; a thought that would come
before text of a given form is closed there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from quire_http.errors import bad_field
from quire_server.api.answer_parser import AnswerParser, call_id
from quire_server.api.context import ServerContext
from quire_server.api.protocol.requests import ChatCall
from quire_server.api.protocol.tools import ToolUse
from quire_server.api.protocol.validation import Json
from quire_server.core.sampling_params import GrammarKind, ThinkingBudget
from quire_server.text.grammar_compiler import GrammarRequest
from quire_server.text.output_parsers import TOOL_FORMS, ToolForm, output_parser
from quire_server.text.output_parsers.call_grammar import CallGrammar
from quire_server.text.output_parsers.reasoning import BEGIN, END


@dataclass(frozen=True)
class ChatPrompt:
    """``grammar``: of calls, None where none are enforced. ``opening``: of a call, at the end of the text.
    ``budget``: of the thought. ``ignored``: fields of the request that change nothing.
    """

    text: str
    grammar: GrammarRequest | None
    tool_form: ToolForm | None
    names: frozenset[str]
    opening: str
    is_thinking: bool
    thinks: bool
    budget: ThinkingBudget | None
    ignored: tuple[str, ...]

    @property
    def is_parsed(self) -> bool:
        """Whether an answer's text may be anything but content."""
        return self.thinks or self.tool_form is not None

    def parser(self, answer: str) -> AnswerParser:
        """A parser of an answer, which the text identifies."""
        form = self.tool_form
        parser = output_parser(form, self.names, thinks=self.thinks, is_thinking=self.is_thinking)
        found = AnswerParser(parser, answer, 0 if form is None else form.id_length)
        found.push(self.opening)
        return found


async def chat_prompt(server: ServerContext, call: ChatCall, client: str) -> ChatPrompt:
    """Render the conversation. Raises ApiError."""
    tools, template = call.tools, server.template
    form = None if tools is None else _form(server)
    is_enforced = tools is not None and tools.is_enforced
    ignored, enable_thinking = list(call.ignored), call.enable_thinking
    if not template.has_thinking_switch and enable_thinking is not None:
        ignored.append("enable_thinking")
    is_formed = is_enforced or call.generation.form is not None
    if template.has_thinking_switch and enable_thinking is None and is_formed:
        enable_thinking = False
    text = await server.render_chat(
        call.messages if form is None or not form.id_length else _with_ids(call.messages, form.id_length),
        client=client,
        tools=() if tools is None else tools.tools,
        enable_thinking=enable_thinking if template.has_thinking_switch else None,
    )
    is_thinking = server.thinks and text.rstrip().endswith(BEGIN)
    if is_thinking and is_formed:
        text, is_thinking = f"{text.rstrip()}\n{END}\n\n", False
    opening = form.opening if form is not None and is_enforced else ""
    budget = None
    if call.thinking_token_budget is not None:
        if server.thinks and not is_formed and enable_thinking is not False:
            budget = _budget(server, call.thinking_token_budget, is_thinking=is_thinking)
        else:
            ignored.append("thinking_token_budget")
    return ChatPrompt(
        text=text + opening,
        grammar=None if tools is None else _grammar(server, tools, call.generation.form),
        tool_form=form,
        names=frozenset() if tools is None else frozenset(one["function"]["name"] for one in tools.tools),
        opening=opening,
        is_thinking=is_thinking,
        thinks=server.thinks and not is_formed,
        budget=budget,
        ignored=tuple(ignored),
    )


def _form(server: ServerContext) -> ToolForm:
    if server.tool_form is None:
        raise bad_field("tools", "this server runs with --tool-call-parser none; leave them out")
    return TOOL_FORMS[server.tool_form]


def _budget(server: ServerContext, max_tokens: int, *, is_thinking: bool) -> ThinkingBudget:
    begin, end = server.tokenizer.token_id(BEGIN), server.tokenizer.token_id(END)
    if end is None or (begin is None and not is_thinking):
        raise bad_field("thinking_token_budget", f"needs a model that has a token for {END}; leave it out")
    return ThinkingBudget(max_tokens, end, None if is_thinking else begin)


def _grammar(server: ServerContext, tools: ToolUse, wanted: GrammarRequest | None) -> GrammarRequest | None:
    """Of calls; and of calls or an answer of the wanted form, where the model may choose."""
    answer = None
    if not tools.is_enforced:
        if wanted is not None and wanted.kind is GrammarKind.JSON:
            answer = json.loads(wanted.text)
        elif not tools.is_strict:
            return None
    grammar = CallGrammar(
        str(server.tool_form),
        tools.schemas,
        tools.is_parallel,
        is_free=not tools.is_enforced,
        special={} if tools.is_enforced else server.shown_tokens,
        answer=answer,
    )
    return GrammarRequest(GrammarKind.TOOLS, grammar.to_json(), "tools")


def _with_ids(messages: Sequence[Json], length: int) -> list[Json]:
    """The same messages with ids of calls as the template takes them; other clients' ids are longer."""
    found = []
    for message in messages:
        if "tool_calls" in message:
            calls = [{**one, "id": call_id(one["id"], length)} for one in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": call_id(message["tool_call_id"], length)}
        found.append(message)
    return found
