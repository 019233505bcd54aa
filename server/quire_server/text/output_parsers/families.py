"""Which form of calls a model writes, and whether it thinks, by its chat template. Pure."""

from __future__ import annotations

from quire_server.text.output_parsers.reasoning import END

_MARKERS = {
    "<tool_call>": "Hermes",
    "[TOOL_CALLS]": "Mistral",
    "<|python_tag|>": "Llama",
    "<start_of_turn>": "Gemma",
}


def tool_form_of(template: str) -> str:
    """The form that the template shows to the model. A template without support for tools gets the Hermes
    form in a system message, see ``text.tool_prompt``.
    """
    return next((form for marker, form in _MARKERS.items() if marker in template), "Hermes")


def thinks(template: str) -> bool:
    """Whether the template has thoughts."""
    return END in template
