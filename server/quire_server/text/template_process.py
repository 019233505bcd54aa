"""The process that renders chat templates, so that a hostile or endless one harms nobody.

Started by `chat.ChatTemplate`; speaks length-prefixed JSON over its standard streams. An immutable Jinja
sandbox keeps the template from Python's objects; an alarm ends this process when a render takes too long,
a limit on its memory when it takes too much. Knows no model and no request.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0
MEMORY_BYTES = 512 << 20
MESSAGE_LIMIT = 64 << 20
_LENGTH = struct.Struct("!I")


def send(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any]:
    """Read one message; EOFError when the other side is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size or (size := _LENGTH.unpack(head)[0]) > MESSAGE_LIMIT:
        raise EOFError
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    message: dict[str, Any] = json.loads(data)
    return message


class Refused(TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message))


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates of the field expect, without anything that reaches the machine."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    jinja.globals["raise_exception"] = _raise_exception
    jinja.filters["tojson"] = _tojson
    return jinja


def answer(jinja: ImmutableSandboxedEnvironment, request: Mapping[str, Any]) -> dict[str, str]:
    """`{"text": ...}`, or `{"error": ..., "kind": syntax|refused}`. A None for messages only compiles."""
    try:
        template = jinja.from_string(request["template"])
        if request["variables"]["messages"] is None:
            return {"text": ""}
        return {"text": template.render(request["variables"])}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "kind": "syntax"}
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in any way that Python knows
        return {"error": str(error)[:500] or type(error).__name__, "kind": "refused"}


def main() -> None:
    """Answer until standard input closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jinja = environment()
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            reply = answer(jinja, request)
        except MemoryError:
            sys.exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(sys.stdout.buffer, reply)


if __name__ == "__main__":
    main()
