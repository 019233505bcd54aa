"""Signature only, for now."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ChatTemplate:
    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> "ChatTemplate":
        raise NotImplementedError

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ChatTemplateError. Blocks (2 s at worst): an event loop calls it in a thread."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
