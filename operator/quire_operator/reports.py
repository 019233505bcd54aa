"""Parses what model servers report about themselves, /statusz and the termination log, as untrusted input.

Code that controls a model's pod controls these texts, and they end up in status and Events. So every value is
bounded, typed and stripped of control characters here, and a text that does not fit is dropped as a whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quire_sizing.errors import SizingError
from quire_sizing.model import ModelShape, from_config

MAX_STATUSZ_BYTES = 16 * 1024
MAX_TERMINATION_CHARS = 4096  # the kubelet's own limit
MAX_MESSAGE_CHARS = 512
MAX_BYTES = 1 << 50
MAX_REQUESTS = 1_000_000
MAX_SECONDS = 30 * 86_400.0
MAX_CONFIG_ENTRIES = 64
MAX_CONFIG_LIST = 512
MAX_LAYERS = 4096
MAX_PARAMETERS = 1 << 50

FETCHING = frozenset({"resolving", "waiting", "downloading", "verifying", "done"})
PHASES = frozenset({"loading", "warming", "serving", "draining", "stalled", "failed"}) | FETCHING
_REASON = re.compile(r"[A-Z][A-Za-z]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9A-Za-z:]{1,80}")
_FILE = re.compile(r"[0-9A-Za-z._-]{1,255}")
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,64}")
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]+")
_INVISIBLE = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]+")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One valid answer of /statusz."""

    phase: str
    reason: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    bytes_per_second: int | None = None
    eta_seconds: int | None = None
    load_seconds: int | None = None
    version: str = ""
    requests: int | None = None  # running and queued
    model: ModelShape | None = None  # the model that it loads or serves


@dataclass(frozen=True, kw_only=True)
class Termination:
    """A container's termination message; `reason` is empty where it is not the server's JSON."""

    reason: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What a download reports on success: digest of the content, revision, and sha256 by file."""

    digest: str
    revision: str
    total_bytes: int
    files: Mapping[str, str]


def parse_fetched(text: object) -> Fetched | None:
    """The termination log of a successful download; None for anything else."""
    document = _json_object(text[:MAX_TERMINATION_CHARS]) if isinstance(text, str) else {}
    digest, revision, files = (document.get(key) for key in ("digest", "revision", "files"))
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    return Fetched(
        digest=digest,
        revision=revision if isinstance(revision, str) and _REVISION.fullmatch(revision) else "",
        total_bytes=_whole(document.get("totalBytes"), MAX_BYTES) or 0,
        files={
            name: sha256
            for name, sha256 in (files if isinstance(files, dict) else {}).items()
            if _FILE.fullmatch(name) and isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        },
    )


def parse_statusz(raw: bytes) -> Sample | None:
    """The answer as a Sample; None when it is too long, no JSON object, or has an unknown phase."""
    if len(raw) > MAX_STATUSZ_BYTES:
        return None
    document = _json_object(raw.decode("utf-8", "replace"))
    phase = document.get("phase")
    if not isinstance(phase, str) or phase not in PHASES:
        return None
    total = _whole(document.get("totalBytes"), MAX_BYTES) or 0
    version = document.get("version")
    running = _whole(document.get("running"), MAX_REQUESTS)
    queued = _whole(document.get("queued"), MAX_REQUESTS)
    return Sample(
        phase=phase,
        reason=_reason(document.get("reason")),
        loaded_bytes=min(_whole(document.get("loadedBytes"), MAX_BYTES) or 0, total),
        total_bytes=total,
        bytes_per_second=_whole(document.get("bytesPerSecond"), MAX_BYTES),
        eta_seconds=_whole(document.get("etaSeconds"), MAX_SECONDS),
        load_seconds=_whole(document.get("loadSeconds"), MAX_SECONDS),
        version=version if isinstance(version, str) and _VERSION.fullmatch(version) else "",
        requests=None if running is None or queued is None else running + queued,
        model=_model(document.get("config")),
    )


def _model(config: object) -> ModelShape | None:
    """The model of these entries of a config.json; None where they are not those of one that could exist."""
    if not isinstance(config, dict) or len(config) > MAX_CONFIG_ENTRIES:
        return None
    if any(isinstance(value, list | dict) and len(value) > MAX_CONFIG_LIST for value in config.values()):
        return None
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > MAX_LAYERS:  # sizing looks at each of them
        return None
    try:
        model = from_config(config)
    except (SizingError, TypeError):
        return None
    numbers = asdict(model).values()
    return model if min(numbers) > 0 and max(numbers) <= MAX_PARAMETERS else None


def parse_termination(text: object) -> Termination:
    """The termination log: our JSON, or the last line that the kubelet took from the container's log."""
    if not isinstance(text, str):
        return Termination()
    text = text[:MAX_TERMINATION_CHARS].strip()
    document = _json_object(text)
    if document:
        return Termination(reason=_reason(document.get("reason")), message=printable(document.get("message")))
    lines = text.splitlines()
    return Termination(message=printable(lines[-1]) if lines else "")


def printable(text: object) -> str:
    """One bounded line without control characters, safe to show in a terminal; not text becomes empty."""
    if not isinstance(text, str):
        return ""
    line = _INVISIBLE.sub("", _NOT_PRINTABLE.sub(" ", text[: 4 * MAX_MESSAGE_CHARS])).strip()
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 3]}..."


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # deeply nested brackets raise RecursionError
        return {}
    return document if isinstance(document, dict) else {}


def _reason(value: object) -> str:
    return value if isinstance(value, str) and _REASON.fullmatch(value) else ""


def _whole(value: object, most: float) -> int | None:
    """A number between 0 and `most`, rounded down; anything else is None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return int(value) if 0 <= value <= most else None
