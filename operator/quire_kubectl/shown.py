"""Which lines of a log were shown, so that a stream can be taken up where it broke.

Used by ``logs`` for each container. The API server cuts ``sinceTime`` to whole seconds, and the two outputs
of a container may change places by a little: a stream is asked for from a second earlier, and the lines that
were shown are known by their time and text. Pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")


class Shown:
    """The last lines of one container."""

    def __init__(self) -> None:
        self._lines: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by the second of their time
        self._first: tuple[int, str] | None = None  # what is older was not asked for

    @property
    def since(self) -> str:
        """From when on lines are needed, as kubectl takes it; empty where none was shown."""
        if not self._lines:
            return ""
        return datetime.fromtimestamp(max(self._lines) - 1, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def news(self, lines: Iterable[str], *, may_be_cut: bool) -> Iterator[str]:
        """Of a stream with times, the lines that were not shown, without their times. `may_be_cut`: a last
        line without an end comes again whole.
        """
        floor = self._first
        known: Counter[str] = sum(self._lines.values(), Counter())
        for line in lines:
            if may_be_cut and not line.endswith("\n"):
                return
            text = line.rstrip("\n")
            stamp = _STAMPED.match(text)
            if stamp is None:  # the kubelet's own words
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
