"""What a delta of an answer has, in the order in which APIs with items or blocks write it.

Blocks have an order and are never opened again, so what comes together is put in order first: a thought, more
of a call that is open, text, new calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quire_server.api.output_processor import OutputDelta

THOUGHT, TEXT, CALL = "thinking", "text", "tool_use"


class Piece(NamedTuple):
    """What a block gains; a call that begins has its id and name."""

    kind: str
    text: str
    call_id: str = ""
    name: str = ""

    def opens(self, kind: str | None) -> bool:
        """Whether it begins a block, after one of this kind."""
        return bool(self.call_id) or self.kind != kind


def pieces(delta: OutputDelta) -> Iterator[Piece]:
    """What a delta has."""
    if delta.reasoning:
        yield Piece(THOUGHT, delta.reasoning)
    calls = list(delta.calls)
    while calls and not calls[0].call_id:
        yield Piece(CALL, calls.pop(0).arguments)
    if delta.text:
        yield Piece(TEXT, delta.text)
    for call in calls:
        yield Piece(CALL, call.arguments, call.call_id, call.name)
