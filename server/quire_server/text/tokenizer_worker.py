"""The child process that tokenises long texts: ``python -m quire_server.text.tokenizer_worker``, started by
``long_texts``.

The first request has the model's directory, the others a text and how many tokens of it are wanted; the
response has their ids, or only their number where there are more. It gives way to every other process: what
takes it long is a text that its client made long.
"""

import base64
import os
import signal
from array import array
from pathlib import Path
from typing import Any

from quire_server.text import child_loop
from quire_server.text.tokenizer import Tokenizer

_NICE = 10
# By far the slowest text of 4 MiB for a vocabulary of 150,000 takes 10 s on a slow CPU, words take 2.
_LIMITS = child_loop.Limits(
    seconds=10.0, memory=512 << 20, setup_seconds=60.0, setup_memory=4 << 30, timer=signal.ITIMER_PROF
)


def prepare(setup: dict[str, Any]) -> child_loop.Handler:
    """A function that tokenises texts for the model of the setup."""
    tokenizer = Tokenizer.load(Path(setup["model"]))
    return lambda request: _tokenize(tokenizer, **request)


def _tokenize(tokenizer: Tokenizer, *, text: str, special: bool, limit: int) -> dict[str, Any]:
    tokens = tokenizer.encode(text, add_special_tokens=special)
    if len(tokens) > limit:
        return {"count": len(tokens)}
    return {"count": len(tokens), "tokens": base64.b64encode(array("i", tokens).tobytes()).decode()}


if __name__ == "__main__":
    os.nice(_NICE)
    child_loop.serve(prepare, _LIMITS)
