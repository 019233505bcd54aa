"""An LLMDeployment as text: how it is, how far loading is, what failed and what to do.

Called by ``status`` with documents of the API; pure. Everything in a status that others wrote is shown
without its control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
_BAR = 24
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e]+")
_HEADS = ("NAMESPACE", "NAME", "PHASE", "READY", "LOADED", "REASON")


def table(documents: Sequence[Document]) -> str:
    """One line each, those that need somebody first."""
    rows = sorted((_row(document) for document in documents), key=lambda row: (row[2] == "Serving", row))
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in (_HEADS, *rows)]
    return "\n".join(lines) if rows else "No LLMDeployments here."


def details(document: Document) -> str:
    """Everything that a status says, the answer first."""
    metadata, status = document["metadata"], _mapping(document.get("status"))
    answer = _text(_condition(status, "Ready").get("message"))
    lines = [
        f"{_text(metadata['namespace'])}/{_text(metadata['name'])}: {_phase(status)}",
        f"  {answer or 'The operator has not looked at it yet: is it running?'}",
        "",
    ]
    failure = _mapping(status.get("lastFailure"))
    engine = _mapping(status.get("engine"))
    facts = [
        ("replicas", _replicas(status)),
        ("model", _model(_mapping(status.get("model")))),
        ("engine", f"{_text(engine.get('version'))} {_text(engine.get('image'))}".strip()),
        ("url", _text(status.get("url"))),
        ("last failure", _failure(failure)),
    ]
    lines += [f"  {name:14}{value}" for name, value in facts if value]
    told = {answer}
    for reason, message in [("", failure.get("message")), *_troubles(status)]:
        if (text := _text(message)) and text not in told:  # a pod's failure is in several conditions
            lines.append(f"  {'':14}{reason}{text}")
            told.add(text)
    return "\n".join(lines)


def code(document: Document) -> int:
    """0: ready; 3: not ready; 4: nothing helps until somebody changes something."""
    status = _mapping(document.get("status"))
    if _condition(status, "Stalled").get("status") == "True":
        return 4
    return 0 if _condition(status, "Ready").get("status") == "True" else 3


def bar(share: float) -> str:
    """A share of 1 as a bar."""
    filled = int(max(0.0, min(1.0, share)) * _BAR)
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:4.0%}"


def _row(document: Document) -> tuple[str, ...]:
    metadata, status = document["metadata"], _mapping(document.get("status"))
    model = _mapping(status.get("model"))
    total = _number(model.get("bytesTotal"))
    loading = _number(status.get("loadingReplicas")) and total
    return (
        _text(metadata["namespace"]),
        _text(metadata["name"]),
        _phase(status),
        f"{_number(status.get('readyReplicas'))}/{_number(status.get('replicas'))}",
        f"{_number(model.get('bytesLoaded')) / total:.0%}" if loading else "-",
        _text(_condition(status, "Ready").get("reason")) or "-",
    )


def _phase(status: Document) -> str:
    return _text(status.get("phase")) or "Unknown"


def _replicas(status: Document) -> str:
    told = f"{_number(status.get('readyReplicas'))} of {_number(status.get('replicas'))} ready"
    for key, word in (("loadingReplicas", "loading"), ("drainingReplicas", "draining")):
        if count := _number(status.get(key)):
            told += f", {count} {word}"
    return told


def _model(model: Document) -> str:
    total, loaded = _number(model.get("bytesTotal")), _number(model.get("bytesLoaded"))
    if not total:
        return ""
    if loaded >= total:
        seconds = model.get("lastLoadSeconds")
        return f"{total / 1e9:.2f} GB" + (f", loaded in {seconds} s the last time" if seconds else "")
    eta = model.get("etaSeconds")
    left = f", {_number(eta)} s left" if eta is not None else ""
    return f"{bar(loaded / total)}  {loaded / 1e9:.2f} of {total / 1e9:.2f} GB{left}"


def _failure(failure: Document) -> str:
    if not failure:
        return ""
    told = f"{_text(failure.get('reason'))} at {_text(failure.get('time'))}"
    if failure.get("pod"):
        told += f" in {_text(failure['pod'])}"
    if failure.get("exitCode") is not None:
        told += f", exit code {_number(failure['exitCode'])}"
    return told


def _troubles(status: Document) -> Iterator[tuple[str, object]]:
    for condition in _conditions(status):
        bad = {"Degraded": "True", "Stalled": "True", "Scheduled": "False", "ScalingActive": "False"}
        if condition.get("status") == bad.get(str(condition.get("type"))):
            yield f"{_text(condition.get('reason'))}: ", condition.get("message")


def _condition(status: Document, kind: str) -> Document:
    return next((c for c in _conditions(status) if c.get("type") == kind), {})


def _conditions(status: Document) -> list[Document]:
    return [c for c in status.get("conditions") or () if isinstance(c, Mapping)]


def _mapping(value: object) -> Document:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _text(value: object) -> str:
    return _CONTROL.sub(" ", value) if isinstance(value, str) else ""
