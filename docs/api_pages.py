"""docs/api.md from the OpenAPI document that a server serves. Called by `docs.generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quire_server.api import openapi

Schema = dict[str, Any]

HEAD = """# HTTP API

What a server answers, made from the document that it serves itself at `/openapi.json`, by `make docs`.
Names and meanings are OpenAI's, and vLLM's where OpenAI has none. A field that is not listed, or a value out
of its bounds, is a 400 that names it; a null is the same as an absent field.

```
curl -s http://127.0.0.1:8080/openapi.json
```

With [keys](operations.md#keys), every route needs `Authorization: Bearer KEY` but those that are public.
Every answer has an `x-request-id`, the request's own if it sent one. What 429, 503 and
`x-quire-degraded` mean is in [Overload](overload.md).
"""


def page() -> str:
    """The whole page."""
    document = openapi.document()
    routes = [
        text
        for path, item in document["paths"].items()
        for method, operation in item.items()
        for text in _route(document, path, method, operation)
    ]
    return "\n\n".join([HEAD.strip(), *routes, "## Errors", *_errors()]) + "\n"


def _route(document: Schema, path: str, method: str, operation: Schema) -> Iterator[str]:
    public = " Public." if {} in operation.get("security", document["security"]) else ""
    yield f"## {method.upper()} {path}"
    statuses = ", ".join(f"`{status}`" for status in operation["responses"])
    yield f"{operation['summary']}{public} Answers {statuses}."
    for parameter in operation.get("parameters", []):
        about = parameter.get("description", "")
        yield f"`{parameter['name']}` in the {parameter['in']}: {_kind(parameter['schema'])}. {about}".strip()
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        for choice in schema.get("anyOf", [schema]):
            head = "| field | type | default | meaning |\n|---|---|---|---|\n"
            yield head + "\n".join(_rows(choice))


def _rows(schema: Schema) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        about = field.get("description", "") + (" **Required.**" if name in required else "")
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        yield f"| `{name}` | {_kind(field)} | {default} | {about} |"


def _kind(schema: Schema) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return " or ".join(_WORDS[kind](schema) for kind in kinds if kind != "null")


def _number(schema: Schema) -> str:
    low = f"more than {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else None
    low = low or (f"{schema['minimum']:g}" if "minimum" in schema else None)
    words = {2**63: "2^63", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    low = words.get(schema.get("minimum"), low)
    high = words.get(schema.get("maximum"), f"{schema['maximum']:g}" if "maximum" in schema else None)
    bounds = f"{low} to {high}" if high is not None else f"{low} or more"
    return f"{schema['type'] if isinstance(schema['type'], str) else schema['type'][0]}, {bounds}"


def _array(schema: Schema) -> str:
    most = f"at most {schema['maxItems']}" if "maxItems" in schema else "any number"
    return f"list of {_kind(schema['items'])} ({most})"


def _string(schema: Schema) -> str:
    return f"string, at most {schema['maxLength']} characters" if "maxLength" in schema else "string"


def _object(schema: Schema) -> str:
    if "properties" in schema:
        return "object of " + "; ".join(
            f"`{name}` ({_kind(one)})" for name, one in schema["properties"].items()
        )
    if "additionalProperties" not in schema:
        return "object"
    return f"object of {_kind(schema['additionalProperties'])} by token id"


_WORDS = {
    "boolean": lambda schema: "true or false",
    "integer": _number,
    "number": _number,
    "string": _string,
    "array": _array,
    "object": _object,
}


def _errors() -> Iterator[str]:
    yield "Each error is OpenAI's object; `param` names the field, `code` is the reason for programs."
    example = {
        "error": {"message": "n: must be ...", "type": "invalid_request_error", "param": "n", "code": None}
    }
    yield f"```json\n{json.dumps(example)}\n```"
    yield "| status | when |\n|---|---|\n" + "\n".join(
        f"| {status} | {about} |" for status, about in openapi.ERRORS.items()
    )
