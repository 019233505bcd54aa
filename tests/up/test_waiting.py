"""What `make up` takes for Ready, and what it says until then."""

from typing import Any

from e2e.up import waiting

IMAGE = "localhost:5000/quire-server:new"


def deployment(**status: Any) -> dict[str, Any]:
    return {"metadata": {"generation": 2}, "status": status}


def ready(value: str, **more: str) -> list[dict[str, str]]:
    return [{"type": "Reconciling", "status": "False"}, {"type": "Ready", "status": value, **more}]


def test_ready_counts_only_for_the_present_spec_and_the_present_image() -> None:
    now = {"observedGeneration": 2, "engine": {"image": IMAGE}, "conditions": ready("True")}
    assert waiting.is_ready(deployment(**now), IMAGE)
    assert not waiting.is_ready(deployment(**now | {"observedGeneration": 1}), IMAGE)
    assert not waiting.is_ready(deployment(**now | {"engine": {"image": "old"}}), IMAGE)
    assert not waiting.is_ready(deployment(**now | {"conditions": ready("False")}), IMAGE)
    assert not waiting.is_ready({}, IMAGE)


def test_progress_and_failures_are_said() -> None:
    loading = deployment(phase="Loading", model={"bytesTotal": 200, "bytesLoaded": 50})
    assert "25 %" in waiting.describe(loading)
    failed = deployment(
        phase="Degraded",
        conditions=ready("False", reason="EngineCrashed", message="Read the log."),
        lastFailure={"reason": "OOMKilled", "message": "Raise the memory."},
    )
    for words in ("EngineCrashed", "Read the log.", "OOMKilled", "Raise the memory."):
        assert words in waiting.describe(failed)
    assert "not seen" in waiting.describe({})
