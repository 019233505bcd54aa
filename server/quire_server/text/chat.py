"""Chat messages -> prompt text, with the model's Jinja chat template.

A template is a program from an untrusted file. It runs in a child process (``chat_worker``) in Jinja's
immutable sandbox, with 2 s and 512 MiB per rendering. When it exceeds them the child dies, this request
fails, and the next one starts a new child.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_server.errors import ChatTemplateError, ConfigError, ModelCorruptError
from quire_server.model_dir.files import ModelFiles
from quire_server.text.child_process import ChildProcess
from quire_server.text.output_parsers import TOOL_FORMS
from quire_server.text.tool_prompt import without_tools

_TEMPLATE_LIMIT = 1 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """Thread-safe; one rendering at a time."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        self._worker = ChildProcess(
            "quire_server.text.chat_worker", {"template": source, "variables": dict(variables)}
        )
        self._source = source
        self._shows_tools = re.search(r"\btools\b", source) is not None
        #: Whether a client can have the model not think.
        self.has_thinking_switch = "enable_thinking" in source
        if source and (error := self._worker.ask().get("error")):
            self.close()
            raise ModelCorruptError(f"{origin}: the chat template cannot be used: {error}")

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> "ChatTemplate":
        """Load the override, else chat_template.jinja, else the one in tokenizer_config.json. A model may
        have none.
        """
        files = ModelFiles.open(model_dir)
        config = files.read_json("tokenizer_config.json") if files.exists("tokenizer_config.json") else {}
        variables = {key: text for key in _SPECIAL if (text := _token_text(config.get(key))) is not None}
        if override is not None:
            try:
                if override.parent == model_dir:  # not trusted: a link must not lead out of the directory
                    source = files.read(override.name, _TEMPLATE_LIMIT).decode(errors="replace")
                else:
                    source = override.read_text()
                return cls(source, variables, str(override))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--chat-template {override} cannot be read: {error}.") from None
            except ModelCorruptError as error:
                raise ConfigError(str(error)) from None
        if files.exists("chat_template.jinja"):
            source = files.read("chat_template.jinja", _TEMPLATE_LIMIT).decode(errors="replace")
            return cls(source, variables, "chat_template.jinja")
        return cls(_template_text(config.get("chat_template")), variables, "tokenizer_config.json")

    @property
    def source(self) -> str:
        """The template's text, empty where there is none."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_form: str = "Hermes",
        enable_thinking: bool | None = None,
    ) -> str:
        """The prompt text; ``tool_form``: how the model is asked to call, where its template does not say it.
        Raises ChatTemplateError. Blocks for up to 2 s: call it in a thread.
        """
        if not self._source:
            raise ChatTemplateError(
                "The model has no chat template. Use /v1/completions, or serve it with --chat-template.",
                param="messages",
            )
        question: dict[str, Any] = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if not self._shows_tools:
            question["messages"] = without_tools(messages, tools, TOOL_FORMS[tool_form])
        elif tools:
            question["tools"] = list(tools)
        if enable_thinking is not None:
            question["enable_thinking"] = enable_thinking
        answer = self._worker.ask(question)
        if "error" in answer:
            raise ChatTemplateError(
                f"The chat template cannot render these messages: {answer['error']}", param="messages"
            )
        return str(answer["text"])

    def close(self) -> None:
        """End the child process. (It also ends when this process does.)"""
        self._worker.close()


def _template_text(value: Any) -> str:
    """The template, or of several the one named default; empty when there is none."""
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _TEMPLATE_LIMIT:
        raise ModelCorruptError(
            "tokenizer_config.json: 'chat_template' is no template. Download the model again."
        )
    return value


def _token_text(value: Any) -> str | None:
    """A special token: a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
