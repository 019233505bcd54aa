"""`status.model` and `status.engine`: the progress of loading pods, the duration of the last load, what
serves.

After a restart of the operator nothing has been polled yet, so stored values are kept until a pod reports new
ones. Knows no condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator import names
from quire_operator.observed import Body
from quire_operator.status.pods import PodState

MAX_FILES = 64


def model(states: Sequence[PodState], old: Mapping[str, Any], *, downloads: bool = False) -> dict[str, Any]:
    """Progress is that of the furthest loading pod, the next to become ready. `downloads`: the model is
    downloaded.
    """
    kept = ("bytesTotal", "lastLoadSeconds", *(("digest", "files", "resolvedRevision") if downloads else ()))
    result: dict[str, Any] = {key: old[key] for key in kept if key in old} | _fetched(states)
    loaded = [s for s in states if s.sample is not None and s.sample.load_seconds is not None]
    if loaded:
        youngest = max(loaded, key=lambda state: (state.created, state.name))
        assert youngest.sample is not None
        result["lastLoadSeconds"] = youngest.sample.load_seconds
    loading = [s.sample for s in states if s.loading and s.sample is not None and s.sample.total_bytes]
    if loading:
        furthest = max(loading, key=lambda sample: sample.loaded_bytes / sample.total_bytes)
        result |= {"bytesTotal": furthest.total_bytes, "bytesLoaded": furthest.loaded_bytes}
        if furthest.eta_seconds is not None:
            result["etaSeconds"] = furthest.eta_seconds
        if furthest.bytes_per_second is not None:
            result["bytesPerSecond"] = furthest.bytes_per_second
    elif any(s.loading for s in states):
        result |= {key: old[key] for key in ("bytesLoaded", "bytesPerSecond", "etaSeconds") if key in old}
    elif "bytesTotal" in result and any(s.ready for s in states):
        result["bytesLoaded"] = result["bytesTotal"]
    return result


def _fetched(states: Sequence[PodState]) -> dict[str, Any]:
    """The result of the youngest completed download; empty where there is none."""
    done = [state for state in states if state.fetched is not None]
    if not done:
        return {}
    fetched = max(done, key=lambda state: (state.created, state.name)).fetched
    assert fetched is not None
    files = [{"name": name, "sha256": sha256} for name, sha256 in sorted(fetched.files.items())][:MAX_FILES]
    values = {"digest": fetched.digest, "resolvedRevision": fetched.revision, "files": files}
    return {key: value for key, value in values.items() if value}


def engine(deployment: Body, states: Sequence[PodState], old: Mapping[str, Any]) -> dict[str, Any]:
    """The image in the pod template, and the version that a pod reports."""
    template = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    image = next(
        (c.get("image") for c in template.get("containers") or () if c.get("name") == names.CONTAINER), None
    )
    if image is None:
        return {}
    reported = [s.sample.version for s in states if s.current and s.sample is not None and s.sample.version]
    version = reported[0] if reported else old.get("version", "") if old.get("image") == image else ""
    return {"image": image, **({"version": version} if version else {})}
