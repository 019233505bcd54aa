"""The access log, among the JSON logs on stderr: a line for each request, without prompts and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import orjson

from quire_http.json_log import timestamp


class AccessLog:
    """A line for each request, written without the machinery of logging, which costs more than the line."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def request(self, facts: Mapping[str, object]) -> None:
        """The line of a request that is over."""
        head = {"time": timestamp(time.time()), "level": "info", "process": "gateway", "message": "request"}
        self._write(orjson.dumps({**head, **facts}) + b"\n")
