"""Signature only, for now."""

from collections.abc import Sequence
from pathlib import Path


class Tokenizer:
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for (logprobs entries carry them)."""
        raise NotImplementedError
