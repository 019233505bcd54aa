"""An LLMDeployment as text: its state, loading progress, failures and remedies.

Pure; from documents of the API. Texts that others wrote into a status are stripped of control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_kubectl.terminal import Look

Document = Mapping[str, Any]
PLAIN = Look()
NO_DEPLOYMENTS = "No LLMDeployments here."
_BAR = 24
_LEAST_BAR = 6
_NAMES = 16  # width of the column of names
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e]+")
_HEADS = ("NAMESPACE", "NAME", "PHASE", "READY", "LOADED", "REASON")
_COLOURS = {
    "Serving": "green",
    "Failed": "red",
    "Degraded": "red",
    "Suspended": "",
    "Idle": "",
    "Unknown": "",
}


def table(documents: Sequence[Document], look: Look = PLAIN) -> str:
    """One line each, those that need attention first."""
    rows, gap = _rows(documents, short=False), 3
    if look.width and sum(_widths(rows)) + gap * (len(_HEADS) - 1) > look.width:
        rows, gap = _rows(documents, short=True), 1
    widths = _widths(rows)
    lines = [look.cut((" " * gap).join(map(str.ljust, row, widths)).rstrip()) for row in (_HEADS, *rows)]
    before = sum(widths[:2]) + 2 * gap
    painted = [
        line[:before]
        + look.paint(line[before:][: len(row[2])], _colour(row[2]))
        + line[before + len(row[2]) :]
        for line, row in zip(lines[1:], rows, strict=True)
    ]
    return "\n".join([lines[0], *painted]) if rows else NO_DEPLOYMENTS


def details(document: Document, look: Look = PLAIN) -> str:
    """The whole status, the overall state first."""
    metadata, status = document["metadata"], _mapping(document.get("status"))
    answer = text(_condition(status, "Ready").get("message"))
    phase = _phase(status)
    lines = [
        f"{text(metadata['namespace'])}/{text(metadata['name'])}: {look.paint(phase, _colour(phase))}",
        *look.wrapped(answer or "The operator has not looked at it yet: is it running?", "  ", "  "),
        "",
    ]
    failure = _mapping(status.get("lastFailure"))
    engine = _mapping(status.get("engine"))
    model = _mapping(status.get("model"))
    facts = [
        ("replicas", _replicas(status)),
        ("prefill", _prefill(status)),
        ("pool", _pool(_mapping(status.get("sharing")))),
        ("model", _model(model)),
        *_progress(model, look),
        ("adapters", _adapters(status)),
        ("context", _context(engine)),
        ("arithmetic", _arithmetic(engine)),
        ("engine", f"{text(engine.get('version'))} {text(engine.get('image'))}".strip()),
        ("url", text(status.get("url"))),
        ("last failure", _failure(failure)),
        ("", text(failure.get("message"))),
    ]
    indent = " " * _NAMES
    # The same failure appears in several conditions.
    shown = {answer, text(failure.get("message"))}
    for kind, reason, message in _troubles(status):
        if message and message not in shown:
            facts.append((kind, f"{reason}: {message}" if kind else message))
            shown.add(message)
    for name, value in facts:
        lines += look.wrapped(value, f"  {name:14}", indent) if value else []
    return "\n".join(lines)


def code(document: Document) -> int:
    """0: ready; 3: not ready, or a replica gets no pod or node; 4: stalled, it needs a change."""
    status = _mapping(document.get("status"))
    if _condition(status, "Stalled").get("status") == "True":
        return 4
    is_ready = _condition(status, "Ready").get("status") == "True"
    return 0 if is_ready and not _lacks_node(status) else 3


def bar(share: float, length: int = _BAR) -> str:
    """A share between 0 and 1 as a bar."""
    filled = int(max(0.0, min(1.0, share)) * length)
    return f"[{'#' * filled}{'.' * (length - filled)}] {share:4.0%}"


def span(seconds: int) -> str:
    """Seconds in readable form: 41 s, 6 min 51 s, 2 h 3 min."""
    if seconds < 100:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def text(value: object) -> str:
    """Foreign text as one line without control characters."""
    return _CONTROL.sub(" ", value) if isinstance(value, str) else ""


def _rows(documents: Sequence[Document], *, short: bool) -> list[tuple[str, ...]]:
    rows = (_row(document, short) for document in documents)
    return sorted(rows, key=lambda row: (row[2] == "Serving", row))


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]


def _row(document: Document, short: bool) -> tuple[str, ...]:
    metadata, status = document["metadata"], _mapping(document.get("status"))
    model = _mapping(status.get("model"))
    total, loaded = _number(model.get("bytesTotal")), _number(model.get("bytesLoaded"))
    loading = (_number(status.get("loadingReplicas")) or status.get("phase") == "Downloading") and total
    size = "" if short else f" of {total / 1e9:.2f} GB{_left(model)}"
    return (
        text(metadata["namespace"]),
        text(metadata["name"]),
        _phase(status),
        f"{_number(status.get('readyReplicas'))}/{_wanted(status)}",
        f"{loaded / total:.0%}{size}" if loading else "-",
        text(_condition(status, "Scheduled" if _lacks_node(status) else "Ready").get("reason")) or "-",
    )


def _colour(phase: str) -> str:
    return _COLOURS.get(phase, "yellow")


def _phase(status: Document) -> str:
    return text(status.get("phase")) or "Unknown"


def _replicas(status: Document) -> str:
    summary = f"{_number(status.get('readyReplicas'))} of {_wanted(status)} ready"
    for key, word in (("loadingReplicas", "loading"), ("drainingReplicas", "draining")):
        if count := _number(status.get(key)):
            summary += f", {count} {word}"
    return summary


def _prefill(status: Document) -> str:
    """The prefill pods; empty where there are none of their own."""
    roles = status.get("roles")
    found = (
        [one for one in roles if _mapping(one).get("name") == "prefill"] if isinstance(roles, list) else []
    )
    return f"{_number(found[0].get('readyReplicas'))} of {_wanted(found[0])} ready" if found else ""


def _pool(sharing: Document) -> str:
    """Whose turn it is among those that share the accelerator; empty for a model that shares none."""
    if not sharing:
        return ""
    state, awake = text(sharing.get("state")), text(sharing.get("awake"))
    found = f"{text(sharing.get('pool'))}: {state.lower()}"
    if state != "Awake" and awake:
        found += f", {awake} has the accelerator"
    if turn := text(sharing.get("turnTime")):
        found += f", its turn at {turn} at the latest"
    took = sharing.get("lastSwapSeconds")
    return found if took is None else f"{found}; its last swap took {span(_number(took))}"


def _wanted(status: Document) -> int:
    """How many replicas are wanted; an earlier release says only how many there are."""
    return _number(status.get("desiredReplicas", status.get("replicas")))


def _model(model: Document) -> str:
    """The model that is loaded; empty for others."""
    total, seconds = _number(model.get("bytesTotal")), _number(model.get("lastLoadSeconds"))
    if not total or _number(model.get("bytesLoaded")) < total:
        return ""
    return f"{total / 1e9:.2f} GB" + (f", loaded in {span(seconds)} the last time" if seconds else "")


def _progress(model: Document, look: Look) -> list[tuple[str, str]]:
    """The loading progress: a bar and, beside or below it, the numbers."""
    total, loaded = _number(model.get("bytesTotal")), _number(model.get("bytesLoaded"))
    if loaded >= total:
        return []
    numbers = f"{loaded / 1e9:.2f} of {total / 1e9:.2f} GB{_left(model)}"
    room = look.width - _NAMES - len("[] 100%") if look.width else 2 * _BAR + len(numbers)
    if room >= _LEAST_BAR + 2 + len(numbers):
        return [("model", f"{bar(loaded / total, min(_BAR, room - 2 - len(numbers)))}  {numbers}")]
    return [("model", bar(loaded / total, max(1, min(_BAR, room)))), ("", numbers)]


def _adapters(status: Document) -> str:
    """How many adapters are ready, and the state of each other one."""
    listed = [_mapping(entry) for entry in status.get("adapters") or ()]
    others = [
        f"{text(one.get('name'))} {text(one.get('state'))} {text(one.get('progress'))}".rstrip()
        for one in listed
        if one.get("state") != "Ready"
    ]
    ready = f"{len(listed) - len(others)} of {len(listed)} ready" if listed else ""
    return f"{ready}: {', '.join(others)}" if others else ready


def _context(engine: Document) -> str:
    """Tokens of a request, and how many were wanted where these are more."""
    length, wanted = _number(engine.get("maxModelLen")), _number(engine.get("wantedModelLen"))
    return f"{length:,}{f' of {wanted:,}' if wanted > length else ''} tokens" if length else ""


def _arithmetic(engine: Document) -> str:
    """How the engine computes, and which defaults made it less exact than the model's files."""
    used = ", ".join(filter(None, (text(engine.get(key)) for key in ("dtype", "quantization"))))
    if kernels := text(engine.get("nativeKernels")):
        used += f", CPU kernels: {kernels}"
    listed = engine.get("inexactDefaults")
    fields = [f"engine.{text(name)}" for name in listed] if isinstance(listed, list) else []
    return f"{used} (less exact by default: {', '.join(fields)})" if fields else used


def _left(model: Document) -> str:
    eta = model.get("etaSeconds")
    return f", {span(_number(eta))} left" if eta is not None else ""


def _failure(failure: Document) -> str:
    if not failure:
        return ""
    summary = f"{text(failure.get('reason'))} at {text(failure.get('time'))}"
    if failure.get("pod"):
        summary += f" in {text(failure['pod'])}"
    if failure.get("exitCode") is not None:
        summary += f", exit code {_number(failure['exitCode'])}"
    return summary


def _troubles(status: Document) -> Iterator[tuple[str, str, str]]:
    """Type, reason and message of each condition that is not as it should be."""
    for condition in _conditions(status):
        bad = {
            "Degraded": "True",
            "Stalled": "True",
            "Scheduled": "False",
            "ScalingActive": "False",
            "DrainFitsNotice": "False",
            "Routed": "False",
            "RanksAuthenticated": "False",
            "TransfersAuthenticated": "False",
            "ContextReduced": "True",
            "TransferDegraded": "True",
            "AdaptersReady": "False",
        }
        if condition.get("status") == bad.get(str(condition.get("type"))):
            kind, reason, message = (text(condition.get(key)) for key in ("type", "reason", "message"))
            yield kind, reason, message


def _lacks_node(status: Document) -> bool:
    return _condition(status, "Scheduled").get("status") == "False"


def _condition(status: Document, kind: str) -> Document:
    return next((c for c in _conditions(status) if c.get("type") == kind), {})


def _conditions(status: Document) -> list[Document]:
    return [c for c in status.get("conditions") or () if isinstance(c, Mapping)]


def _mapping(value: object) -> Document:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
