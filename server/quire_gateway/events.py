"""Server-sent events as bytes: passed on unchanged, but only whole ones.

A client that has half an event when its stream is cut cannot read the error that follows. So the part of an
event that is not whole waits for its end. Most replicas send whole events, for which nothing is copied.
"""

from __future__ import annotations

_END = b"\n\n"
_MAX_HELD = 1 << 20  # bytes of one event; a longer one is passed on in parts


class WholeEvents:
    """One stream."""

    def __init__(self) -> None:
        self._held = b""

    def add(self, data: bytes) -> bytes:
        """The bytes that can be passed on now."""
        if not self._held and data.endswith(_END):
            return data
        data = self._held + data
        end = data.rfind(_END) + len(_END)
        if end < len(_END):  # none
            end = len(data) if len(data) > _MAX_HELD else 0
        self._held = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What is left when the stream has ended."""
        held, self._held = self._held, b""
        return held
