"""JSON logs on stderr, one object a line; and the access log among them, without prompts and answers."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record and its extra fields as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        line = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "process": "gateway",
            "logger": record.name,
            "message": record.getMessage(),
            **extra,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=repr).decode()


def configure(level: str) -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def timestamp(seconds: float) -> str:
    """UTC with milliseconds."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{stamp}.{int(seconds % 1 * 1000):03d}Z"


class AccessLog:
    """A line for each request, written without the machinery of logging, which costs more than the line."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def request(self, facts: Mapping[str, object]) -> None:
        """The line of a request that is over."""
        head = {"time": timestamp(time.time()), "level": "info", "process": "gateway", "message": "request"}
        self._write(orjson.dumps({**head, **facts}) + b"\n")
