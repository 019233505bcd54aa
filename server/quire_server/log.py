"""JSON logs on stderr, one object per line, so that a log store can index them without a parser.

Fields are passed in `extra` (client, status, ...), those of the current request in `request_facts`. Prompts
and answers are never logged, except by `api.request_log` where the user has enabled it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


#: Fields of the current request in every log line: request_id, trace_id, span_id. Each asyncio task has its
#: own.
request_facts: ContextVar[Mapping[str, str]] = ContextVar("request_facts", default=MappingProxyType({}))


class JsonFormatter(logging.Formatter):
    """Formats a record and its extra fields as one JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON. Values that JSON cannot encode appear as their repr."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **request_facts.get(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


def configure(process: str, level: str) -> None:
    """Log to stderr as JSON, with the name of this process in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
