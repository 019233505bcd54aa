"""The child process that renders a chat template: ``python -m quire_server.text.chat_worker``, started by
``chat``.

The first request has the template and its variables, the others have messages; responses are ``text`` or
``error``. ``child_loop`` limits time and memory.
"""

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire_server.text import child_loop

_TEXT_LIMIT = 8 << 20
_GLOBALS = ("dict", "namespace", "range")


class _RefusedError(TemplateError):
    """Raised by a template's raise_exception."""


def prepare(setup: dict[str, Any]) -> child_loop.Handler:
    """A function that renders messages with the template of the setup."""
    template, variables = compiled(setup["template"]), setup["variables"]
    return lambda messages: {"text": rendered(template, variables | messages)}


def compiled(source: str) -> Template:
    """The template in the sandbox, with the whitespace rules and the filter of Hugging Face's chat
    templates.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def rendered(template: Template, variables: Mapping[str, Any]) -> str:
    """The rendered text. Raises TemplateError where it is too long."""
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
    child_loop.serve(prepare)
