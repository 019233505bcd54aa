"""How families of models write calls: a parser for what they write of their own, and a grammar that has them
call.

`Auto` speaks and calls as the model likes, and is parsed. An enforced call begins with the form's opening,
which is a part of the prompt, and goes on by the grammar, whose text the same parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire_server.text.output_parsers.call_object import call_object, object_of_arguments
from quire_server.text.output_parsers.feed import Feed, OutputParser, Steps
from quire_server.text.output_parsers.pythonic import call, call_list

_MISTRAL = "[TOOL_CALLS]"
_MAX_NAME = 64


def _hermes(feed: Feed, names: Collection[str]) -> Steps[None]:
    """`<tool_call>{...}</tool_call>`, anywhere and as often as the model likes: Hermes, Qwen."""
    while (yield from feed.text_until("<tool_call>")):
        length = feed.at
        yield from feed.skip_space()
        if not (yield from call_object(feed, names)):
            feed.release(length)
            continue
        yield from _drop(feed, "</tool_call>")


def _llama(feed: Feed, names: Collection[str]) -> Steps[None]:
    """`{"name": ..., "parameters": ...}` as the whole answer, several of them after semicolons: Llama
    3.1 and later.
    """
    yield from feed.skip_space()
    if (yield from feed.is_next("<|python_tag|>")):
        yield from feed.skip_space()
    yield from _objects(feed, names)
    yield from feed.rest_is_text()


def _objects(feed: Feed, names: Collection[str]) -> Steps[bool]:
    """Objects with nothing but semicolons and white space between them. False where the first is no call."""
    is_call = False
    while (yield from call_object(feed, names)):
        is_call = True
        yield from feed.skip_space()
        yield from feed.is_next(";")
        yield from feed.skip_space()
    feed.at = 0
    return is_call


def _mistral(feed: Feed, names: Collection[str]) -> Steps[None]:
    """`[TOOL_CALLS]` and a list of objects, or the name and an object."""
    while (yield from feed.text_until(_MISTRAL)):
        length = feed.at
        if (yield from feed.skip_space()) == "[":
            is_call = yield from _object_list(feed, names)
        else:
            is_call = yield from _named_object(feed, names)
        if not is_call:
            feed.release(length)


def _object_list(feed: Feed, names: Collection[str]) -> Steps[bool]:
    feed.at += 1
    if not (yield from call_object(feed, names)):
        return False
    while (yield from feed.skip_space()) == ",":
        feed.at += 1
        if not (yield from call_object(feed, names)):
            return True
    if (yield from feed.is_next("]")):
        feed.consume()
    return True


def _named_object(feed: Feed, names: Collection[str]) -> Steps[bool]:
    begin = feed.at
    while (end := feed.text.find("{", begin)) < 0:
        if len(feed.text) - begin > _MAX_NAME + len("[ARGS]") or not (yield from feed.more()):
            return False
    name = feed.text[begin:end].strip().removesuffix("[ARGS]").partition("[CALL_ID]")[0]
    if name not in names:
        return False
    feed.at = end
    yield from object_of_arguments(feed, name)
    return True


def _pythonic(feed: Feed, names: Collection[str]) -> Steps[None]:
    """`[f(a=1), g()]` as the beginning of the answer."""
    if (yield from feed.skip_space()) == "[":
        yield from call_list(feed, names)
        feed.at = 0
        yield from feed.rest_is_text()
    else:
        yield from _llama(feed, names)


def _gemma(feed: Feed, names: Collection[str]) -> Steps[None]:
    """In a block of `tool_code`, or as the beginning of the answer: Python's calls, or JSON objects."""
    yield from feed.skip_space()
    yield from _python_or_object(feed, names)
    feed.at = 0
    while (yield from feed.text_until("```tool_code\n", "```json\n", "```python\n")):
        length = feed.at
        if not (yield from _python_or_object(feed, names)):
            feed.release(length)
            continue
        yield from _drop(feed, "```")


def _python_or_object(feed: Feed, names: Collection[str]) -> Steps[bool]:
    first = yield from feed.skip_space()
    if first == "[":
        return (yield from call_list(feed, names))
    if first == "{":
        return (yield from _objects(feed, names))
    return (yield from call(feed, names))


def _drop(feed: Feed, end: str) -> Steps[None]:
    """Drop what ends a call, where it is there."""
    yield from feed.skip_space()
    if (yield from feed.is_next(end)):
        feed.consume()
    feed.at = 0


@dataclass(frozen=True)
class ToolForm:
    """One way to write calls. Enforced ones are `opening`, objects with `between` between them, and
    `closing`. ``markers``: tokens that the text has to show, though they may be special.
    """

    parse: Callable[[Feed, Collection[str]], Steps[None]]
    opening: str = ""
    between: str = "; "
    closing: str = ""
    arguments: str = "parameters"
    markers: tuple[str, ...] = ()
    id_length: int = 0  # of the ids that its chat templates take, 0 for any

    def written(self, calls: Iterable[Mapping[str, Any]]) -> str:
        """Calls, with `name` and `arguments`, as an answer that has to call writes them."""
        objects = [
            json.dumps({"name": one["name"], self.arguments: one["arguments"]}, ensure_ascii=False)
            for one in calls
        ]
        return self.opening + self.between.join(objects) + self.closing

    def parser(self, names: Collection[str]) -> OutputParser:
        """A parser of calls of these names."""
        return OutputParser(lambda feed: self.parse(feed, names))


TOOL_FORMS: Mapping[str, ToolForm] = MappingProxyType(
    {
        "Hermes": ToolForm(
            _hermes,
            "<tool_call>\n",
            "\n</tool_call>\n<tool_call>\n",
            "\n</tool_call>",
            "arguments",
            markers=("<tool_call>", "</tool_call>"),
        ),
        "Llama": ToolForm(_llama, markers=("<|python_tag|>",)),
        "Mistral": ToolForm(
            _mistral,
            f"{_MISTRAL}[",
            ", ",
            "]",
            "arguments",
            markers=(_MISTRAL, "[ARGS]", "[CALL_ID]"),
            id_length=9,
        ),
        # Python has no schema: what is enforced is an object, which both read, too.
        "Pythonic": ToolForm(_pythonic),
        "Gemma": ToolForm(_gemma),
    }
)
