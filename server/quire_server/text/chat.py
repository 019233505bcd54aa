"""Messages to prompt text, by the model's chat template: a program of the model's, so it is not trusted.

Called by the API process. The template runs in a process of its own (`template_process`) that ends itself
when a render takes too long or too much memory; the next render starts a new one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_server.core.errors import ChatTemplateError, ConfigError, ModelCorruptError
from quire_server.core.model_files import ModelFiles
from quire_server.text import template_process
from quire_server.text.tokenizer import token_text

TEMPLATE_LIMIT = 1 << 20
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One template and the process that renders it. Safe to use from several threads; they take turns."""

    def __init__(self, source: str | None, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> ChatTemplate:
        """The template in `override`, else the model's. A template that does not compile is an error here."""
        files = ModelFiles.open(model_dir)
        config = files.read_json("tokenizer_config.json") if files.exists("tokenizer_config.json") else {}
        variables = {name: text for name in _SPECIAL_TOKENS if (text := token_text(config.get(name)))}
        template = cls(_source(files, config, override), variables)
        if template._source is not None:
            _check(template, override)
        return template

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ChatTemplateError. Blocks, 2 s at worst: call it in a thread."""
        if self._source is None:
            raise ChatTemplateError(
                "This model has no chat template. Use /v1/completions, or start the server with "
                "--chat-template.",
                param="messages",
            )
        reply = self._ask(
            {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **self._variables}
        )
        if "text" not in reply:
            raise ChatTemplateError(
                f"The model's chat template refuses these messages: {reply['error']}", param="messages"
            )
        return str(reply["text"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        request = {"template": self._source, "variables": variables}
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                template_process.send(process.stdin, request)
                return template_process.receive(process.stdout)
            except (EOFError, OSError):
                self._end()
        raise ChatTemplateError(
            f"The model's chat template took over {template_process.SECONDS:g} s or "
            f"{template_process.MEMORY_BYTES >> 20} MiB for these messages. Send fewer or shorter ones.",
            param="messages",
        )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", template_process.__name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _source(files: ModelFiles, config: Mapping[str, Any], override: Path | None) -> str | None:
    if override is not None:
        try:
            return override.read_bytes()[:TEMPLATE_LIMIT].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {override} cannot be read: {error}.") from None
    if files.exists("chat_template.jinja"):
        return files.read("chat_template.jinja", TEMPLATE_LIMIT).decode(errors="replace")
    stated = config.get("chat_template")
    if isinstance(stated, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None


def _check(template: ChatTemplate, override: Path | None) -> None:
    """Compile once at start, so that a broken template is found before the first client."""
    reply = template._ask({"messages": None})
    if reply.get("kind") == "syntax":
        template.close()
        if override is not None:
            raise ConfigError(f"--chat-template {override} is not a template: {reply['error']}")
        raise ModelCorruptError(
            f"The model's chat template is broken: {reply['error']}. Mend it, or give one with "
            "--chat-template."
        )
