"""Parses what model servers report about themselves, /statusz and the termination log, as untrusted input.

Code that controls a model's pod controls these texts, and they end up in status and Events. So every value is
bounded, typed and stripped of control characters here, and a text that does not fit is dropped as a whole.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from quire_operator.spec.schema import ADAPTER_NAME
from quire_sizing.errors import SizingError
from quire_sizing.model import ModelShape, from_config

STALE_SECONDS = 30.0  # after which an answer says nothing of the present; pods are asked every ten
MAX_STATUSZ_BYTES = 256 * 1024  # a leader lists the ranks of all nodes, and any pod its adapters
MAX_GOLDEN_CHARS = 64 * 1024  # as many as a server reads
MAX_TERMINATION_CHARS = 4096  # the kubelet's own limit
MAX_MESSAGE_CHARS = 512
MAX_NAME_CHARS = 253
MAX_BYTES = 1 << 50
MAX_REQUESTS = 1_000_000
MAX_SECONDS = 30 * 86_400.0
MAX_CONFIG_ENTRIES = 64
MAX_CONFIG_LIST = 512
MAX_LAYERS = 4096
MAX_PARAMETERS = 1 << 50
MAX_CONTEXT = 1 << 24
MAX_CANARY_TOKENS = 64
MAX_TOKEN_ID = 1 << 31
MAX_GOLDEN_TOKENS = 16  # entries of a ConfigMap
MAX_PROCESSES = 40  # of a pod: 32 ranks, and what is beside them
MAX_RANK = 999
MAX_ADAPTERS = 256  # as many as a server loads
MAX_STEPS = 1 << 63

FETCHING = frozenset({"resolving", "waiting", "downloading", "verifying", "done"})
PHASES = frozenset({"loading", "warming", "serving", "draining", "stalled", "failed"}) | FETCHING
INEXACT_DEFAULTS = ("dtype", "quantization")  # fields of spec.engine
_REASON = re.compile(r"[A-Z][A-Za-z]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_POD = re.compile(r"[a-z0-9.-]{1,253}")
_REVISION = re.compile(r"[0-9A-Za-z:]{1,80}")
_FILE = re.compile(r"[0-9A-Za-z._-]{1,255}")
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,64}")
_ADAPTER = re.compile(ADAPTER_NAME)
_ADAPTER_STATES = frozenset({"Fetching", "Loading", "Ready", "Failed", "Unloaded"})
_FORMAT = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}(, [a-z0-9]{1,8})?")
_PROCESS = re.compile(r"api|engine|health|supervisor|rank [0-9]{1,3}")
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]+")
_INVISIBLE = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]+")


@dataclass(frozen=True, kw_only=True)
class Effective:
    """What the engine serves with. `wanted_model_len`: the context that was asked for, else the model's own.
    `inexact_defaults`: settings that the spec did not choose and that make answers less exact.
    `native_kernels`: the instruction set of the CPU kernels, empty on a GPU.
    """

    max_model_len: int
    wanted_model_len: int
    dtype: str
    quantization: str
    inexact_defaults: tuple[str, ...] = ()
    native_kernels: str = ""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """The engine's first answer to the canary, and the fingerprint of what the answer depends on."""

    fingerprint: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GoldenTokens:
    """The answer that is kept for a fingerprint, and the pod that gave it."""

    canary: Canary
    pod: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One of the processes that share a model. `missing`: why it does not take part, empty where it does.
    `host`: the pod in which it runs, where that is known. `step_micros`: microseconds that it computed in its
    last step, without waits for other ranks.
    """

    rank: int
    last_step: int
    missing: str = ""
    host: str = ""
    step_micros: int = 0


@dataclass(frozen=True, kw_only=True)
class AdapterReport:
    """A LoRA adapter in a pod. `state`: Fetching, Loading, Ready, Failed or Unloaded; `message`: why it does
    not answer.
    """

    name: str
    state: str
    message: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    revision: str = ""


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
    seconds_since_request: float | None = None  # while it serves
    quiet_since: float | None = None  # when it had the last request, in Unix time; the poller computes it
    asked_at: float = field(default=0.0, compare=False)  # in Unix time, by the poller
    model: ModelShape | None = None  # the model that it loads or serves
    effective: Effective | None = None  # once the model is loaded
    canary: Canary | None = None  # once it has run
    silent: tuple[str, ...] = ()  # processes that do not run, and ranks that take no part in a step
    ranks: tuple[RankReport, ...] = ()  # where several share the model
    slow_rank: int | None = None  # of a group that serves, from several answers
    adapters: tuple[AdapterReport, ...] = ()
    transfer_degraded: bool = False  # it computed the last prompt itself that a prefill pod should have


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
        seconds_since_request=_number(document.get("secondsSinceRequest"), MAX_SECONDS),
        model=_model(document.get("config")),
        effective=_effective(document.get("effective")),
        canary=_canary(document.get("canary")),
        silent=_silent(document.get("silent")),
        ranks=_ranks(document.get("ranks")),
        adapters=_adapters(document.get("adapters")),
        transfer_degraded=document.get("transferDegraded") is True,
    )


def has_unsettled_adapters(sample: Sample) -> bool:
    """Whether an adapter is on its way."""
    return any(report.state in ("Fetching", "Loading") for report in sample.adapters)


def parse_golden_tokens(text: object) -> tuple[GoldenTokens, ...]:
    """What the ConfigMap of golden tokens holds, which users may write: its valid entries, the first of each
    fingerprint.
    """
    if not isinstance(text, str) or len(text) > MAX_GOLDEN_CHARS:
        return ()
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    found: dict[str, GoldenTokens] = {}
    for entry in listed if isinstance(listed, list) else ():
        canary = _canary(entry)
        pod = entry.get("pod") if canary is not None else None
        if canary is not None and isinstance(pod, str) and _POD.fullmatch(pod):
            found.setdefault(canary.fingerprint, GoldenTokens(canary=canary, pod=pod))
    return tuple(found.values())[:MAX_GOLDEN_TOKENS]


def _silent(said: object) -> tuple[str, ...]:
    """The names that a server can have for its processes."""
    listed = said[:MAX_PROCESSES] if isinstance(said, list) else ()
    return tuple(name for name in listed if isinstance(name, str) and _PROCESS.fullmatch(name))


def _ranks(said: object) -> tuple[RankReport, ...]:
    """All that a pod lists, in their order, or none: a leader's are those of its whole group, and the first
    of a worker is not rank 0.
    """
    if not isinstance(said, list) or len(said) > MAX_PROCESSES:
        return ()
    found: list[RankReport] = []
    for entry in said:
        if not isinstance(entry, dict):
            return ()
        rank, step = _whole(entry.get("rank"), MAX_RANK), _whole(entry.get("lastStep"), MAX_STEPS)
        if rank is None or step is None or (found and rank <= found[-1].rank):
            return ()
        found.append(
            RankReport(
                rank=rank,
                last_step=step,
                missing=_reason(entry.get("missing")),
                host=_host(entry.get("host")),
                step_micros=round(1e6 * (_number(entry.get("stepSeconds"), MAX_SECONDS) or 0.0)),
            )
        )
    return tuple(found)


def _adapters(said: object) -> tuple[AdapterReport, ...]:
    """The valid entries, the first of each name."""
    found: dict[str, AdapterReport] = {}
    for entry in said[:MAX_ADAPTERS] if isinstance(said, list) else ():
        name, state = (entry.get("name"), entry.get("state")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(state, str):
            continue
        if state not in _ADAPTER_STATES or len(name) > MAX_NAME_CHARS or not _ADAPTER.fullmatch(name):
            continue
        total = _whole(entry.get("total_bytes"), MAX_BYTES) or 0
        revision = entry.get("revision")
        report = AdapterReport(
            name=name,
            state=state,
            message=printable(entry.get("reason")),
            loaded_bytes=min(_whole(entry.get("bytes"), MAX_BYTES) or 0, total),
            total_bytes=total,
            revision=revision if isinstance(revision, str) and _REVISION.fullmatch(revision) else "",
        )
        found.setdefault(name, report)
    return tuple(found.values())


def _host(said: object) -> str:
    return said if isinstance(said, str) and _POD.fullmatch(said) else ""


def merged_ranks(reports: Sequence[Sequence[RankReport]]) -> tuple[RankReport, ...]:
    """The ranks of a group from the reports of its pods, each rank once: a leader lists those of its workers,
    which list their own.
    """
    found: dict[int, RankReport] = {}
    for one in (one for ranks in reports for one in ranks):
        other = found.get(one.rank, one)
        found[one.rank] = RankReport(
            rank=one.rank,
            last_step=max(one.last_step, other.last_step),
            missing=other.missing or one.missing,
            host=other.host or one.host,
            step_micros=max(one.step_micros, other.step_micros),
        )
    return tuple(found[rank] for rank in sorted(found))


def slowest_rank(ranks: Sequence[RankReport]) -> RankReport | None:
    """The rank that is missing, else the one whose last step is the oldest, else one that computes more than
    twice as long as the others; None where all are alike.
    """
    if not ranks:
        return None
    slowest = min(ranks, key=lambda one: (not one.missing, one.last_step))
    if slowest.missing or slowest.last_step < max(one.last_step for one in ranks):
        return slowest
    longest = max(ranks, key=lambda one: one.step_micros)
    return longest if longest.step_micros > 2 * _usual_micros(ranks) > 0 else None


def _usual_micros(ranks: Sequence[RankReport]) -> int:
    return statistics.median_low(one.step_micros for one in ranks)


def _canary(said: object) -> Canary | None:
    """All of it or None."""
    if not isinstance(said, dict):
        return None
    fingerprint, tokens = said.get("fingerprint"), said.get("tokens")
    if not isinstance(fingerprint, str) or not _SHA256.fullmatch(fingerprint):
        return None
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_CANARY_TOKENS:
        return None
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in tokens):
        return None
    return Canary(fingerprint=fingerprint, tokens=tuple(tokens))


def _effective(said: object) -> Effective | None:
    """All of it or None: half of it would be misleading."""
    if not isinstance(said, dict):
        return None
    length, wanted = (_whole(said.get(key), MAX_CONTEXT) for key in ("maxModelLen", "wantedModelLen"))
    if not length or not wanted or length > wanted:
        return None
    dtype, quantization = _format(said.get("dtype")), _format(said.get("quantization"))
    kernels = _format(said["nativeKernels"]) if "nativeKernels" in said else ""
    if dtype is None or quantization is None or kernels is None:
        return None
    listed = said.get("inexactDefaults")
    inexact = tuple(name for name in INEXACT_DEFAULTS if isinstance(listed, list) and name in listed)
    return Effective(
        max_model_len=length,
        wanted_model_len=wanted,
        dtype=dtype,
        quantization=quantization,
        inexact_defaults=inexact,
        native_kernels=kernels,
    )


def _format(said: object) -> str | None:
    return said if isinstance(said, str) and _FORMAT.fullmatch(said) else None


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
    needed = (getattr(model, item.name) for item in fields(model) if item.default is MISSING)
    return model if min(needed) > 0 and max(asdict(model).values()) <= MAX_PARAMETERS else None


def parse_termination(text: object) -> Termination:
    """The termination log: our JSON or, where the server could write none, the end of the container's log,
    which the kubelet takes then.
    """
    if not isinstance(text, str):
        return Termination()
    text = text[:MAX_TERMINATION_CHARS].strip()
    document = _json_object(text)
    if document and not _is_log_line(document):
        return Termination(reason=_reason(document.get("reason")), message=printable(document.get("message")))
    return Termination(message=_last_error(text.splitlines()))


def _last_error(lines: Sequence[str]) -> str:
    """The message of the last error in a log; a line that is no JSON is one, such as the end of a traceback.

    Other lines say nothing about the end, and neither does the rest of a line whose beginning is cut off.
    """
    for number, line in reversed(list(enumerate(lines))):
        document = _json_object(line)
        if _is_log_line(document):
            if document["level"] in ("error", "critical"):
                return printable(document.get("message"))
        elif line.strip() and not (number == 0 and line.endswith("}")):
            return printable(line)
    return ""


def _is_log_line(document: Mapping[str, Any]) -> bool:
    return "level" in document and "message" in document


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
    number = _number(value, most)
    return None if number is None else int(number)


def _number(value: object, most: float) -> int | float | None:
    """A number between 0 and `most`; anything else is None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if 0 <= value <= most else None
