"""Which lines of a log were printed, so that an interrupted stream can be resumed without gaps or
repetitions.

The API server truncates ``sinceTime`` to whole seconds, and stdout and stderr of a container may be reordered
slightly: a stream is requested from a second earlier, and printed lines are recognized by time and text.
Pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")


class PrintedLines:
    """The last lines of one container."""

    def __init__(self) -> None:
        self._lines: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by second
        self._first: tuple[int, str] | None = None  # older lines were not requested

    @property
    def since(self) -> str:
        """The time from which lines are needed, for kubectl's --since-time; empty where none was printed."""
        if not self._lines:
            return ""
        return datetime.fromtimestamp(max(self._lines) - 1, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def news(self, lines: Iterable[str], *, may_be_cut: bool) -> Iterator[str]:
        """The lines of a stream that were not printed, without their timestamps. `may_be_cut`: a last line
        without a newline will be repeated in full.
        """
        floor = self._first
        known: Counter[str] = sum(self._lines.values(), Counter())
        for line in lines:
            if may_be_cut and not line.endswith("\n"):
                return
            text = line.rstrip("\n")
            stamp = _STAMPED.match(text)
            if stamp is None:  # a message of the kubelet
                yield text
                continue
            if known[text]:
                known[text] -= 1
                continue
            second = int(datetime.fromisoformat(stamp[1] + stamp[3]).timestamp())
            moment = (second, (stamp[2] or "").ljust(9, "0"))
            if floor is not None and moment < floor:
                continue
            self._first = self._first or moment
            self._lines[second][text] += 1
            newest = max(self._lines)
            for old in [one for one in self._lines if one < newest - 1]:
                del self._lines[old]
            yield text[stamp.end() :]
