"""Tokenises long texts in a child process, so that one takes neither the time of the API process nor its
memory: a text of 4 MiB takes seconds and half a gigabyte.
"""

import base64
from array import array
from pathlib import Path

from quire_server.errors import RequestError
from quire_server.text.child_process import ChildProcess


class LongTexts:
    """Thread-safe; one text at a time. The process starts with the first one."""

    def __init__(self, model_dir: Path) -> None:
        self._worker = ChildProcess("quire_server.text.tokenizer_worker", {"model": str(model_dir)})

    def encode(self, text: str, *, add_special_tokens: bool, limit: int) -> tuple[int, ...] | int:
        """Token ids; only their number where there are more than ``limit``. Raises RequestError. Blocks for
        up to 10 s of CPU: call it in a thread.
        """
        answer = self._worker.ask({"text": text, "special": add_special_tokens, "limit": limit})
        if "error" in answer:
            raise RequestError(f"The text of {len(text)} characters cannot be tokenised: {answer['error']}")
        if "tokens" not in answer:
            return int(answer["count"])
        return tuple(array("i", base64.b64decode(answer["tokens"])))

    def close(self) -> None:
        """End the child process. (It also ends when this process does.)"""
        self._worker.close()
