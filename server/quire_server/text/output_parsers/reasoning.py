"""What a model thinks before it answers: `<think>...</think>` at the beginning of an answer.

Some templates begin the thought in the prompt, so that the answer has its end alone. White space around a
thought is neither thought nor answer.
"""

from __future__ import annotations

from quire_server.text.output_parsers.feed import Feed, Steps
from quire_server.text.output_parsers.pieces import Reasoning, Text

BEGIN, END = "<think>", "</think>"


def thought(feed: Feed, *, is_begun: bool) -> Steps[None]:
    """Read the thought, if there is one. ``is_begun``: in the prompt."""
    if not is_begun:
        yield from feed.skip_space()
        if not (yield from feed.is_next(BEGIN)):
            feed.at = 0
            return
    feed.kind = Reasoning
    yield from feed.skip_space()
    feed.consume()
    yield from feed.text_until(END)
    feed.kind = Text
    yield from feed.skip_space()
    feed.consume()
