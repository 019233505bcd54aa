"""The grammar of enforced calls, and of calls in an answer that is free otherwise, for llguidance.

Enforced: the whole answer is calls, after the form's opening, which is a part of the prompt. Free: the model
speaks, and where it calls, the arguments satisfy the schema. Either way the form's own parser reads the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quire_server.text.output_parsers.tool_forms import TOOL_FORMS, ToolForm

MAX_CALLS = 8  # of an answer that has to call: a model need not find an end by itself


@dataclass(frozen=True)
class CallGrammar:
    """``schemas``: of the arguments of each tool that may be called. ``is_free``: whether the model may speak
    too, and where there is a schema ``answer``, a value of it in the place of text. ``special``: ids of
    markers of calls and thoughts that are special tokens, which text cannot match.
    """

    form: str
    schemas: Mapping[str, Mapping[str, Any]]
    is_parallel: bool
    is_free: bool
    special: Mapping[str, int] = field(default_factory=dict)
    answer: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """As the text of a request for a grammar."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CallGrammar:
        """The inverse of ``to_json``."""
        return cls(**json.loads(text))

    def to_lark(self, options: Mapping[str, object]) -> str:
        """``options``: of the schemas, for the compiler."""
        form = TOOL_FORMS[self.form]
        if not self.is_free:
            rules = _enforced(form, is_parallel=self.is_parallel)
        elif self.answer is None:
            rules = _free(form, self.special)
        else:
            answer = json.dumps({**self.answer, "x-guidance": dict(options)})
            rules = [
                f"start: answer | {_begun(form, self.special)} {_calls(form)}",
                f"answer: %json {answer}",
            ]
        rules.append("call: " + " | ".join(f"call{number}" for number in range(len(self.schemas))))
        for number, name in enumerate(self.schemas):
            rules += self._call(f"call{number}", name, form, options)
        return "\n".join(rules)

    def _call(self, rule: str, name: str, form: ToolForm, options: Mapping[str, object]) -> list[str]:
        schema = self.schemas[name]
        if self.answer is not None and not form.opening:
            # Both the call and the answer are JSON then. The grammar's lexer does not backtrack, so that only
            # one JSON schema for the whole call lets it decide between them.
            members = {"name": {"const": name}, form.arguments: schema}
            whole = {"type": "object", "properties": members, "required": list(members)}
            whole |= {key: schema[key] for key in ("$defs", "definitions") if key in schema}  # for references
            return [f"{rule}: %json {_json({**whole, 'additionalProperties': False}, options)}"]
        head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
        return [
            f'{rule}: {json.dumps(head)} {rule}_arguments "}}"',
            f"{rule}_arguments: %json {_json(schema, options)}",
        ]


def _json(schema: Mapping[str, Any], options: Mapping[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": dict(options)})


def _calls(form: ToolForm) -> str:
    """What follows the opening."""
    closing = f" {json.dumps(form.closing)}" if form.closing else ""
    return f"call ({json.dumps(form.between)} call)*{closing}"


def _marker(form: ToolForm, special: Mapping[str, int]) -> str:
    """The special token that the opening begins with, empty where it is text."""
    return next((one for one in special if form.opening.startswith(one)), "")


def _begun(form: ToolForm, special: Mapping[str, int]) -> str:
    """The opening."""
    marker = _marker(form, special)
    text = form.opening.removeprefix(marker)
    parts = [f"<[{special[marker]}]>"] if marker else []
    return " ".join([*parts, json.dumps(text)] if text else parts)


def _enforced(form: ToolForm, *, is_parallel: bool) -> list[str]:
    closing = f" {json.dumps(form.closing)}" if form.closing else ""
    more = f" ({json.dumps(form.between)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    return [f"start: call{more}{closing}"]


def _free(form: ToolForm, special: Mapping[str, int]) -> list[str]:
    """With an opening, text up to it, as often as the model likes; without one, text or calls."""
    marker = _marker(form, special)
    others = ",".join(str(number) for one, number in special.items() if one != marker)
    begin = f"(BEGIN? <[{others}]>)* " if others else ""
    begins = (
        [r"BEGIN: /(.|\n)+/" if form.opening else r"BEGIN: /[ \t\r\n]*[^{ \t\r\n](.|\n)*/"] if others else []
    )
    if marker:
        calls = f"{_begun(form, special)} {_calls(form)}"
        return [f"start: speech ({calls} speech)*", f"speech: {begin}TEXT?", r"TEXT: /(.|\n)+/", *begins]
    if not form.opening:
        text = r"TEXT: /(.|\n)*/ & ~/[ \t\r\n]*\{(.|\n)*/"
        return [f"start: {begin}(TEXT | {_calls(form)})", text, *begins]
    opening = "".join(f"\\{c}" if c in r"\/[](){}.*+?|^$" else c for c in form.opening).replace("\n", r"\n")
    return [
        f"start: {begin}(TEXT | (speech call {json.dumps(form.closing)})+ TEXT)",
        rf"speech[lazy]: /(.|\n)*{opening}/",
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{opening}(.|\n)*/",
        *begins,
    ]
