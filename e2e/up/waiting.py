"""Waits until an LLMDeployment is Ready and shows what changes on the way."""

import time
from typing import Any

from e2e.kubectl import Kubectl
from e2e.progress import Progress
from e2e.up.errors import UpError

_POLL_SECONDS = 0.5


def until_ready(kubectl: Kubectl, name: str, namespace: str, image: str, *, seconds: float) -> None:
    """Shows every change of phase, progress and reason until `image` serves; fails when the time is over."""
    began, status, shown = time.monotonic(), Progress(), ""
    while True:
        found = kubectl.get("llmdeployments", name, namespace) or {}
        state = describe(found)
        waited = time.monotonic() - began
        if state != shown:
            status.keep(f"  {waited:4.0f} s  {state}")
            shown = state
        else:
            status.update(f"{waited:4.0f} s  {state}")
        if is_ready(found, image):
            status.end()
            return
        if waited > seconds:
            raise UpError(
                f"{name} was not Ready within {seconds:.0f} s: {state}\n"
                f"See `kubectl describe llmdep {name}` and `kubectl logs -l serving.quire.dev/name={name}`"
            )
        time.sleep(_POLL_SECONDS)


def is_ready(found: dict[str, Any], image: str) -> bool:
    """Whether the status is about the present spec and the present image, and says Ready."""
    status = found.get("status", {})
    ready = _ready(status)
    generation = found.get("metadata", {}).get("generation")
    is_about_now = (
        status.get("observedGeneration") == generation and status.get("engine", {}).get("image") == image
    )
    return is_about_now and ready.get("status") == "True"


def describe(found: dict[str, Any]) -> str:
    """The status in one line."""
    status = found.get("status", {})
    ready = _ready(status)
    words = [status.get("phase") or "not seen by the operator yet"]
    model = status.get("model", {})
    if model.get("bytesTotal") and status.get("phase") == "Loading":
        words.append(f"{100 * model.get('bytesLoaded', 0) // model['bytesTotal']} % loaded")
    if ready.get("status") == "True":
        return "  ".join(words)
    words += [word for word in (ready.get("reason"), ready.get("message")) if word]
    failure = status.get("lastFailure")
    if failure:
        words.append(f"last failure: {failure.get('reason')}: {failure.get('message', '')}")
    return "  ".join(words)


def _ready(status: dict[str, Any]) -> dict[str, Any]:
    conditions: list[dict[str, Any]] = status.get("conditions", [])
    return next((condition for condition in conditions if condition.get("type") == "Ready"), {})
