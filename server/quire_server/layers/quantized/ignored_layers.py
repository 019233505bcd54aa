r"""The layers that a quantised checkpoint left dense, by name or pattern.

Patterns come from an untrusted file. The only wildcards are ``.`` ``.*`` and ``\d+``, at most three per
pattern, so that matching costs at most the cube of a short name's length.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.errors import ConfigError

_LIMIT = 200
_MAX_WILDCARDS = 3
_MAX_PATTERNS = 10_000
_SAFE = re.compile(r"\^?(?:[\w-]|\\\.|\.\*|\.|\\d\+?)*\$?")


@dataclass(frozen=True, slots=True)
class IgnoredLayers:
    """``names``: whole names. ``parts``: runs of components between dots. ``patterns``: match the
    beginning.
    """

    names: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def has(self, name: str) -> bool:
        """Whether the layer is not quantised."""
        return (
            name in self.names
            or any(f".{part}." in f".{name}." for part in self.parts)
            or any(pattern.match(name) for pattern in self.patterns)
        )


def checked(key: str, entries: Sequence[str]) -> Sequence[str]:
    """The entries, if their number and lengths are plausible. Raises ConfigError otherwise."""
    if len(entries) > _MAX_PATTERNS or any(len(entry) > _LIMIT for entry in entries):
        raise ConfigError(
            f"{key} has more than {_MAX_PATTERNS} entries, or one of more than {_LIMIT} characters."
        )
    return entries


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    """The compiled pattern. Raises ConfigError if it is not safe to match."""
    wildcards = pattern.count(".*") + pattern.count(r"\d")
    if not _SAFE.fullmatch(pattern) or wildcards > _MAX_WILDCARDS:
        raise ConfigError(
            f"{key}: pattern {pattern[:60]!r} is not supported. Supported are names with at most "
            f"{_MAX_WILDCARDS} of .* and \\d+; name the layers one by one."
        )
    return re.compile(pattern)
