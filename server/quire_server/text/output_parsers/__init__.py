"""What is in the text of an answer: thoughts, text, and calls of tools.

A parser takes the text as it comes and gives pieces, at every split the same ones. Pure; knows no HTTP and no
tokens.
"""

from collections.abc import Collection

from quire_server.text.output_parsers.feed import Feed, OutputParser, Steps
from quire_server.text.output_parsers.pieces import Arguments, CallName, Piece, Reasoning, Text
from quire_server.text.output_parsers.reasoning import thought
from quire_server.text.output_parsers.tool_forms import TOOL_FORMS, ToolForm

__all__ = [
    "TOOL_FORMS",
    "Arguments",
    "CallName",
    "OutputParser",
    "Piece",
    "Reasoning",
    "Text",
    "ToolForm",
    "output_parser",
]


def output_parser(
    form: ToolForm | None, names: Collection[str], *, thinks: bool, is_thinking: bool
) -> OutputParser:
    """A parser of calls of these names in a form, none without one, and of a thought where the model
    ``thinks``; ``is_thinking``: the prompt has begun it.
    """

    def parse(feed: Feed) -> Steps[None]:
        if thinks:
            yield from thought(feed, is_begun=is_thinking)
        if form is not None:
            yield from form.parse(feed, names)
        else:
            yield from feed.rest_is_text()

    return OutputParser(parse)
