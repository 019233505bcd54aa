"""`quire-server detect-watermark`: reports whether a text carries the watermark of a key.

Needs only the model's tokenizer: no weights, no server. The text is tokenized again, which nearly always
gives the tokens that were sampled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from quire_server.core.watermark import Detection, Watermark, detect, read_key
from quire_server.errors import ConfigError
from quire_server.text.tokenizer import Tokenizer

_MAX_BYTES = 16 << 20


def main(argv: Sequence[str]) -> None:
    """Print the statistic of a text. Raises QuireServerError."""
    parser = argparse.ArgumentParser(
        prog="quire-server detect-watermark",
        allow_abbrev=False,
        description="Say whether a text carries the watermark of a key.",
    )
    parser.add_argument("--model", required=True, type=Path, help="directory of the model (its tokenizer)")
    parser.add_argument("--key-path", required=True, type=Path, help="the server's --watermark-key-path")
    parser.add_argument("--gamma", type=float, default=0.5, help="the server's --watermark-gamma (0.5)")
    parser.add_argument("file", nargs="?", type=Path, help="the text, in UTF-8 (default: standard input)")
    arguments = parser.parse_args(argv)
    if not 0.01 <= arguments.gamma <= 0.99:
        raise ConfigError(f"--gamma={arguments.gamma:g}: must be between 0.01 and 0.99")
    watermark = Watermark(read_key(arguments.key_path), arguments.gamma)
    tokens = Tokenizer.load(arguments.model).encode(_text(arguments.file), add_special_tokens=False)
    sys.stdout.write(report(detect(tokens, watermark)))


def report(found: Detection) -> str:
    """One line for each number, and one for the verdict."""
    return (
        f"tokens: {found.num_tokens}\n"
        f"green fraction: {found.green_fraction:.3f}\n"
        f"z-score: {found.z_score:.2f}\n"
        f"p-value: {found.p_value:.3g}\n"
        f"verdict: {found.verdict}\n"
    )


def _text(path: Path | None) -> str:
    try:
        if path is None:
            data = _read(sys.stdin.buffer)
        else:
            with path.open("rb") as file:
                data = _read(file)
        return data.decode()
    except OSError as error:
        raise ConfigError(f"The text {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigError("The text is not UTF-8: convert it first.") from None


def _read(file: BinaryIO) -> bytes:
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"The text is longer than {_MAX_BYTES} bytes: cut it, a part says as much.")
    return data
