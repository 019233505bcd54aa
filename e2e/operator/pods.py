"""Pod statuses as a kubelet writes them, from ready to each way of failing."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

Status = dict[str, Any]


def at(seconds: float = 0) -> str:
    """The timestamp `seconds` from now."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: str, *, reason: str = "", message: str = "", ago: float = 60) -> Status:
    texts = {key: text for key, text in (("reason", reason), ("message", message)) if text}
    return {"type": kind, "status": status, "lastTransitionTime": at(-ago), **texts}


def container(state: Status, *, last: Status | None = None, restarts: int = 0, ready: bool = False) -> Status:
    return {
        "name": "server",
        "image": "registry.example/quire-server:1",
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": restarts,
        "state": state,
        **({"lastState": last} if last else {}),
    }


def status(*containers: Status, conditions: tuple[Status, ...] = (), ip: str = "") -> Status:
    placed = (condition("PodScheduled", "True"), condition("PodReadyToStartContainers", "True"))
    return {
        "phase": "Running" if containers else "Pending",
        "conditions": list(conditions or (*placed, condition("Ready", "False", ago=30))),
        "containerStatuses": list(containers),
        **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
    }


def running(since: float = 20, **details: Any) -> Status:
    return container({"running": {"startedAt": at(-since)}}, **details)


def ready() -> Status:
    return status(running(ready=True), conditions=(condition("Ready", "True"),))


def loading(ip: str = "") -> Status:
    return status(running(), ip=ip)


def fetcher(state: Status, *, last: Status | None = None, restarts: int = 0) -> Status:
    """The download container runs, and the server waits for it."""
    waiting = container({"waiting": {"reason": "PodInitializing"}})
    first = {**container(state, last=last, restarts=restarts), "name": "fetch"}
    return {**status(waiting), "initContainerStatuses": [first]}


def fetching() -> Status:
    return fetcher({"running": {"startedAt": at(-20)}})


def fetch_failed(code: int, reason: str, message: str, *, restarts: int = 0) -> Status:
    """The download ended with our JSON in the termination log and is about to be retried."""
    text = json.dumps({"reason": reason, "message": message, "exitCode": code})
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}}
    return fetcher(back_off, last=end(code, message=text), restarts=restarts)


def only_fetching(ip: str) -> Status:
    """The pod of a download Job: without probes it is ready as soon as it runs."""
    container_ = {**container({"running": {"startedAt": at(-5)}}, ready=True), "name": "fetch"}
    return status(
        container_, conditions=(condition("PodScheduled", "True"), condition("Ready", "True")), ip=ip
    )


def only_fetched(code: int, message: str) -> Status:
    """The same pod when it has ended with this termination message."""
    container_ = {**container(end(code, message=message)), "name": "fetch"}
    return {**status(container_), "phase": "Failed" if code else "Succeeded"}


def fetch_result() -> str:
    """The termination message of a successful download."""
    said = {"digest": f"sha256:{'a' * 64}", "revision": "c0ffee" + "0" * 34, "totalBytes": 7}
    return json.dumps({"reason": "Fetched", **said, "files": {"config.json": "b" * 64}})


def fetched() -> Status:
    """The download has completed, and the server loads the model."""
    first = fetcher(end(0, "Completed", fetch_result()))["initContainerStatuses"]
    return {**status(running()), "initContainerStatuses": first}


def end(code: int, reason: str = "Error", message: str = "") -> Status:
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": at(-60),
            "finishedAt": at(-30),
            "containerID": "containerd://0",
        }
    }


def terminated(code: int, reason: str, *, restarts: int = 0, message: str = "it says what and why") -> Status:
    """Ended with our JSON in the termination log, and about to be restarted."""
    text = json.dumps({"reason": reason, "message": message, "exitCode": code})
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}}
    return status(container(back_off, last=end(code, message=text), restarts=restarts))


def ended_well() -> Status:
    """Exit code 0 and started again: what --version in extraArgs does, for ever."""
    return status(running(since=1, last=end(0, "Completed"), restarts=1))


def killed_for_memory() -> Status:
    return status(running(last=end(137, "OOMKilled"), restarts=1))


def waiting(reason: str, message: str) -> Status:
    return status(container({"waiting": {"reason": reason, "message": message}}))


def unschedulable(message: str) -> Status:
    return {
        "phase": "Pending",
        "conditions": [condition("PodScheduled", "False", reason="Unschedulable", message=message)],
    }


def gated() -> Status:
    """Held back by a scheduling gate; the API server writes no time for it."""
    reported = condition("PodScheduled", "False", reason="SchedulingGated", message="Scheduling is blocked")
    del reported["lastTransitionTime"]
    return {"phase": "Pending", "conditions": [reported]}


def disrupted(reason: str, message: str) -> Status:
    """About to be deleted, for the reason in the condition."""
    target = condition("DisruptionTarget", "True", reason=reason, message=message, ago=5)
    return {**ready(), "conditions": [condition("Ready", "True"), target]}


def put_out(reason: str, message: str) -> Status:
    """Evicted by the kubelet for lack of a resource."""
    return {**status(container(end(137))), "phase": "Failed", "reason": reason, "message": message}


def silent() -> Status:
    """A ready pod after its node stopped responding, as the node controller writes it."""
    return {
        **ready(),
        "conditions": [condition("Ready", "False", ago=5), condition("ContainersReady", "True")],
    }


def not_mounted() -> Status:
    return {
        "phase": "Pending",
        "conditions": [
            condition("PodScheduled", "True", ago=120),
            condition("PodReadyToStartContainers", "False", ago=120),
        ],
        "containerStatuses": [container({"waiting": {"reason": "ContainerCreating"}})],
    }
