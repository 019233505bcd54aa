"""The request log: one line for each request, without its text unless the administrator wants it.

With `metadata` a line has the client and the costs; only with `content` does it have text, cut to a bound and
with every match of the administrator's patterns replaced.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from quire_server.errors import ConfigError

logger = logging.getLogger(__name__)

REDACTED = "[redacted]"
_MAX_PATTERNS = 100
# Patterns are applied to so much more than is logged, so that a match at the cut is found as a whole.
_SLACK = 4096

Decode = Callable[[Sequence[int]], str]


class RequestLogging(StrEnum):
    """Values of --log-requests."""

    OFF = "off"
    METADATA = "metadata"
    CONTENT = "content"


class Transcript:
    """The text of one request, kept only where it is to be logged. ``decode``: the text of token ids;
    ``enough``: characters of a prompt, as many as are ever looked at.
    """

    def __init__(self, decode: Decode, enough: int) -> None:
        self._decode = decode
        self._enough = enough
        self.prompt = ""
        self._answers: dict[int, str] = defaultdict(str)

    @property
    def answer(self) -> str:
        """All answers, one after the other."""
        return "\n".join(self._answers[index] for index in sorted(self._answers))

    def keep_messages(self, messages: Sequence[Mapping[str, str]]) -> None:
        """The prompt of a chat."""
        self.prompt = "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def keep_prompts(self, prompts: Sequence[str | tuple[int, ...]]) -> None:
        """The prompts of a completion. Token ids become text: a pattern would find nothing in numbers."""
        texts, room = [], self._enough
        for prompt in prompts:
            texts.append(prompt if isinstance(prompt, str) else self._decode(prompt[:room]))
            room -= min(len(prompt), room)
        self.prompt = "\n".join(texts)

    def keep_answer(self, index: int, text: str) -> None:
        """What one answer gained."""
        self._answers[index] += text


class RequestLog:
    """One line for each request."""

    def __init__(
        self, mode: RequestLogging, patterns: tuple[re.Pattern[str], ...] = (), max_characters: int = 2000
    ) -> None:
        self._mode = mode
        self._patterns = patterns
        self._max_characters = max_characters

    def open(self, decode: Decode) -> Transcript | None:
        """Something to keep a request's text in; None where nothing is to be kept."""
        if self._mode is not RequestLogging.CONTENT:
            return None
        return Transcript(decode, self._max_characters + _SLACK)

    def write(self, facts: Mapping[str, object], transcript: Transcript | None) -> None:
        """The line of a request that is over."""
        if self._mode is RequestLogging.OFF:
            return
        content = {}
        if transcript is not None:
            content = {"prompt": self._shown(transcript.prompt), "answer": self._shown(transcript.answer)}
        logger.info("request", extra={**facts, **content})

    def _shown(self, text: str) -> str:
        shown = text[: self._max_characters + _SLACK]
        for pattern in self._patterns:
            shown = pattern.sub(REDACTED, shown)
        return shown[: self._max_characters]


def read_patterns(path: Path | None) -> tuple[re.Pattern[str], ...]:
    """One regular expression a line; empty lines and those that begin with # are none. Raises ConfigError."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--log-redact-path {path}: {error}; give a text file that can be read") from None
    sources = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if len(sources) > _MAX_PATTERNS:
        raise ConfigError(f"--log-redact-path {path}: more than {_MAX_PATTERNS} patterns; join some with |")
    patterns: list[re.Pattern[str]] = []
    for number, line in sources:
        try:
            patterns.append(re.compile(line))
        except re.error as error:
            raise ConfigError(f"--log-redact-path {path}, line {number}: {error}; mend the pattern") from None
    return tuple(patterns)
