"""What an answer of the gateway means for a line: done, failed for good, or to be asked for again. Pure.

No room (429, 503) is no failure of the line: it waits until there is some, or its batch expires. A gateway
that cannot be reached is the same. Other errors of servers are tried again a few times. All else is the
line's own, and so is an error that says that it should not be tried again, such as that of a spent budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

MAX_FAILURES = 5
#: So often may a worker die with a line in flight, before the line is taken for the reason.
MAX_LOSSES = 3
_FIRST_DELAY_SECONDS = 2.0
_LONGEST_DELAY_SECONDS = 60.0
_REFUSED = frozenset((429, 503))
_OVERLOAD = frozenset((502, 504))
#: They pass: a kill switch is switched off, the gateway's keys come back. A line's expiry bounds it.
_PASSING = frozenset((("invalid_delegation", 401), ("kill_switch", 503)))


class Verdict(StrEnum):
    """What becomes of a line."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"  # there was no room: again, and fewer at once
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came from the gateway; status 0: nothing, and why is in the body."""

    status: int
    request_id: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict, and how long to wait where the line is asked for again."""

    verdict: Verdict
    delay: float = 0.0
    is_overload: bool = False  # ask for fewer at once


def judge(answer: Answer, failures: int) -> Outcome:
    """``failures``: how often the line has failed before, refusals aside."""
    if answer.status == 200:
        return Outcome(Verdict.DONE if _is_object(answer.body) else Verdict.FAILED)
    if (_code(answer.body), answer.status) in _PASSING:
        return Outcome(Verdict.REFUSED, _LONGEST_DELAY_SECONDS)
    if answer.headers.get("x-should-retry") == "false":
        return Outcome(Verdict.FAILED)
    if answer.status in _REFUSED or answer.status == 0:
        return Outcome(Verdict.REFUSED, _retry_after(answer))
    if answer.status < 500 or failures + 1 >= MAX_FAILURES:
        return Outcome(Verdict.FAILED)
    delay = _FIRST_DELAY_SECONDS * 2**failures
    return Outcome(Verdict.AGAIN, delay, is_overload=answer.status in _OVERLOAD)


def is_lines_own_fault(answer: Answer) -> bool:
    """Of a line that has failed: whether by what it asks for, and not by what servers do."""
    return 400 <= answer.status < 500


def response(answer: Answer) -> bytes:
    """OpenAI's `response` of a line, as one line. The body is not parsed and written again: what is nested
    deep can be read and not be written.
    """
    body: Any = orjson.Fragment(answer.body.replace(b"\n", b" ").replace(b"\r", b" "))
    try:
        orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        body = {"error": {"message": "The answer was no JSON.", "code": "invalid_answer"}}
    return orjson.dumps({"status_code": answer.status, "request_id": answer.request_id, "body": body})


def lost(request_id: str) -> Answer:
    """In the place of the answer to a line that is not asked for any more."""
    message = f"The batch worker died {MAX_LOSSES} times while it waited for this line."
    error = {"message": message, "type": "server_error", "param": None, "code": "line_lost"}
    return Answer(500, request_id, orjson.dumps({"error": error}), {})


def _code(body: bytes) -> str:
    """Of an error, empty where there is none."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


def _retry_after(answer: Answer) -> float:
    """Whole seconds, as gateways write them; 0 where there is no such number."""
    text = answer.headers.get("retry-after", "")
    return min(float(text), _LONGEST_DELAY_SECONDS) if text.isascii() and text.isdecimal() else 0.0
