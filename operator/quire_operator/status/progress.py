"""How far loading pods are, how long the last load took, and what serves: `status.model`, `status.engine`.

Called by `status.of`. After a restart of the operator nothing was polled yet, so what is stored stays until
a pod says otherwise. Knows no condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator import names
from quire_operator.observed import Body
from quire_operator.status.pods import PodState

MAX_FILES = 64


def model(states: Sequence[PodState], old: Mapping[str, Any], *, downloads: bool = False) -> dict[str, Any]:
    """The loading pod that is furthest tells when there will be one more. `downloads`: pods fetch it."""
    kept = ("bytesTotal", "lastLoadSeconds", *(("digest", "files", "resolvedRevision") if downloads else ()))
    told: dict[str, Any] = {key: old[key] for key in kept if key in old} | _fetched(states)
    loaded = [s for s in states if s.sample is not None and s.sample.load_seconds is not None]
    if loaded:
        youngest = max(loaded, key=lambda state: (state.created, state.name))
        assert youngest.sample is not None
        told["lastLoadSeconds"] = youngest.sample.load_seconds
    loading = [s.sample for s in states if s.loading and s.sample is not None and s.sample.total_bytes]
    if loading:
        furthest = max(loading, key=lambda sample: sample.loaded_bytes / sample.total_bytes)
        told |= {"bytesTotal": furthest.total_bytes, "bytesLoaded": furthest.loaded_bytes}
        if furthest.eta_seconds is not None:
            told["etaSeconds"] = furthest.eta_seconds
        if furthest.bytes_per_second is not None:
            told["bytesPerSecond"] = furthest.bytes_per_second
    elif any(s.loading for s in states):
        told |= {key: old[key] for key in ("bytesLoaded", "bytesPerSecond", "etaSeconds") if key in old}
    elif "bytesTotal" in told and any(s.ready for s in states):
        told["bytesLoaded"] = told["bytesTotal"]
    return told


def _fetched(states: Sequence[PodState]) -> dict[str, Any]:
    """What the youngest pod that has fetched the model got; empty while none has, or none had to."""
    done = [state for state in states if state.fetched is not None]
    if not done:
        return {}
    fetched = max(done, key=lambda state: (state.created, state.name)).fetched
    assert fetched is not None
    files = [{"name": name, "sha256": sha256} for name, sha256 in sorted(fetched.files.items())][:MAX_FILES]
    told = {"digest": fetched.digest, "resolvedRevision": fetched.revision, "files": files}
    return {key: value for key, value in told.items() if value}


def engine(deployment: Body, states: Sequence[PodState], old: Mapping[str, Any]) -> dict[str, Any]:
    """The image that pods are made from, and the version that one of them reports."""
    template = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    image = next(
        (c.get("image") for c in template.get("containers") or () if c.get("name") == names.CONTAINER), None
    )
    if image is None:
        return {}
    reported = [s.sample.version for s in states if s.current and s.sample is not None and s.sample.version]
    version = reported[0] if reported else old.get("version", "") if old.get("image") == image else ""
    return {"image": image, **({"version": version} if version else {})}
