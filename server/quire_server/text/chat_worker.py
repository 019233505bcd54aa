"""The child process that runs a chat template: ``python -m quire_server.text.chat_worker``, started by
``chat``.

One JSON object a line: first the template and its variables, then messages; one answer a line, ``text`` or
``error``. The kernel ends it when a rendering takes too long (an alarm with its default action: fatal) or
too much memory.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SECONDS = 2.0
_MEMORY = 512 << 20
_TEXT_LIMIT = 8 << 20
_GLOBALS = ("dict", "namespace", "range")


class _RefusedError(TemplateError):
    """What a template says by raise_exception."""


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    template: Template | None = None
    answer: dict[str, Any]
    variables: dict[str, str] = {}
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        question = json.loads(line)
        try:
            if template is None:
                template, variables = compiled(question["template"]), question["variables"]
                answer = {"ok": True}
            else:
                answer = {"text": rendered(template, variables | question)}
        except MemoryError:
            answer = {"error": "it takes too much memory."}
        except (
            Exception
        ) as error:  # whatever a template does wrong is an answer, and the next one may be right
            answer = {"error": f"{str(error)[:500] or type(error).__name__}"}
        encoded = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(encoded + b"\n")
        sys.stdout.buffer.flush()


def compiled(source: str) -> Template:
    """The template in its sandbox, with the whitespace rules and the filter that model authors expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def rendered(template: Template, variables: Mapping[str, Any]) -> str:
    """The text, as long as it stays within bounds."""
    parts, length = [], 0
    for part in template.generate(**variables):
        length += len(part)
        if length > _TEXT_LIMIT:
            raise TemplateError("its text is too long.")
        parts.append(part)
    return "".join(parts)


def _refuse(message: object) -> None:
    raise _RefusedError(str(message))


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


if __name__ == "__main__":
    main()
