"""Golden tokens: what the canary has to answer, as the first ready replica with the same fingerprint did.

Without them each engine compares the canary with its own first answer, so one whose weights are damaged from
the start takes wrong tokens for right ones. The file is a mounted ConfigMap that the operator keeps, and it
may appear later. It is a check on this engine and no condition of its start: an absent, malformed or
oversized file is said in the log, once, and there are no golden tokens then.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 10
_MAX_TOKENS = 64
_MAX_POD = 253  # characters of a pod's name


@dataclass(frozen=True)
class Golden:
    """The tokens, and the pod that answered them."""

    tokens: tuple[int, ...]
    pod: str


def fingerprint(facts: Mapping[str, object]) -> str:
    """Of what the canary's tokens depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class GoldenTokens:
    """Those of one fingerprint, in the file `path`; None: there is no file."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._was_said = False

    def find(self) -> Golden | None:
        """As the file has them now."""
        if self._path is None:
            return None
        try:
            return _find(_read(self._path), self._fingerprint)
        except FileNotFoundError:
            self._say(logging.INFO, "there is no file yet")
        except (OSError, ValueError, RecursionError) as error:
            self._say(logging.WARNING, f"{type(error).__name__}: {error}")
        return None

    def _say(self, level: int, why: str) -> None:
        if not self._was_said:
            self._was_said = True
            facts = {"path": str(self._path), "why": why}
            logger.log(
                level, "no golden tokens: the canary is compared with its own first answer", extra=facts
            )


def _read(path: Path) -> object:
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES} bytes")
    return json.loads(raw)


def _find(document: object, fingerprint: str) -> Golden | None:
    """The first entry of this fingerprint; entries of others are not looked at."""
    if not isinstance(document, list):
        raise ValueError("it is no list")
    for entry in document:
        if isinstance(entry, dict) and entry.get("fingerprint") == fingerprint:
            tokens, pod = entry.get("tokens"), entry.get("pod")
            if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
                raise ValueError("its tokens are no short list")
            if not all(type(token) is int for token in tokens):
                raise ValueError("its tokens are no integers")
            return Golden(tuple(tokens), pod[:_MAX_POD] if isinstance(pod, str) else "")
    return None
