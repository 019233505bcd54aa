"""Signature only, for now."""

from collections.abc import Sequence

from quire_server.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    stopped: str | None  # the stop string that ended the text

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        raise NotImplementedError

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        raise NotImplementedError

    def finish(self) -> str:
        """Text that was held back."""
        raise NotImplementedError
