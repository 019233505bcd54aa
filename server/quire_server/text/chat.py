"""Chat messages -> prompt, by the model's own Jinja template. Called by the API process, in a thread.

A template is a program from an untrusted file. It runs in a child process (``chat_worker``): an immutable
sandbox with no globals but Jinja's harmless ones, 2 s and 512 MiB per rendering, and no way to hurt
anything else when it goes over them: the child dies, this request fails, the next one gets a new child.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_server.core.errors import ChatTemplateError, ConfigError, ModelCorruptError
from quire_server.core.model_files import ModelFiles
from quire_server.text.child import Child

_TEMPLATE_LIMIT = 1 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """Safe to share between threads; one rendering at a time."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        self._worker = Child(
            "quire_server.text.chat_worker", {"template": source, "variables": dict(variables)}
        )
        self._source = source
        if source and (error := self._worker.ask().get("error")):
            self.close()
            raise ModelCorruptError(f"{origin}: the chat template cannot be used: {error}")

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> "ChatTemplate":
        """The override, else chat_template.jinja, else tokenizer_config.json's. A model may have none."""
        files = ModelFiles.open(model_dir)
        config = files.read_json("tokenizer_config.json") if files.exists("tokenizer_config.json") else {}
        variables = {key: text for key in _SPECIAL if (text := _token_text(config.get(key))) is not None}
        if override is not None:
            try:
                return cls(override.read_text(), variables, str(override))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--chat-template {override} cannot be read: {error}.") from None
            except ModelCorruptError as error:
                raise ConfigError(str(error)) from None
        if files.exists("chat_template.jinja"):
            source = files.read("chat_template.jinja", _TEMPLATE_LIMIT).decode(errors="replace")
            return cls(source, variables, "chat_template.jinja")
        return cls(_template_text(config.get("chat_template")), variables, "tokenizer_config.json")

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ChatTemplateError. Blocks (2 s at worst): an event loop calls it in a
        thread.
        """
        if not self._source:
            raise ChatTemplateError(
                "The model has no chat template. Use /v1/completions, or serve it with --chat-template.",
                param="messages",
            )
        question = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        answer = self._worker.ask(question)
        if "error" in answer:
            raise ChatTemplateError(
                f"The chat template cannot render these messages: {answer['error']}", param="messages"
            )
        return str(answer["text"])

    def close(self) -> None:
        """End the child. (It also ends by itself when this process does.)"""
        self._worker.close()


def _template_text(value: Any) -> str:
    """A template, or the one called default of several; empty when there is none."""
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
