"""Many LLMDeployments with the status that the Deployment controller would write: for figures and for
churn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.operator import pods
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World
from e2e.waiting import eventually

PER_NAMESPACE = 100
AT_ONCE = 8
DONE = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}


@dataclass(frozen=True)
class Fleet:
    """`size` LLMDeployments in namespaces of a hundred each."""

    world: World
    size: int

    def place(self, number: int) -> tuple[str, str]:
        """Namespace and name of the n-th."""
        return f"fleet-{number // PER_NAMESPACE}", f"m{number}"

    def make_namespaces(self) -> None:
        """Create the namespaces."""
        for number in range(0, self.size, PER_NAMESPACE):
            self.world.namespace(self.place(number)[0])

    def make(self, number: int) -> None:
        """Create one."""
        self.world.deploy(*self.place(number), replicas=1)

    def serve(self, number: int) -> None:
        """Write a ready pod and the status of the Deployment controller."""
        namespace, name = self.place(number)
        eventually("its Deployment", lambda: self.world.get("Deployment", namespace, name))
        self.world.make_pod(namespace, name, pods.ready())
        self.world.roll_out(namespace, name, ready=1, progressing=DONE)

    def make_and_serve(self, number: int) -> None:
        """In small batches, because an LLMDeployment that does not serve is reconciled every ten seconds."""
        self.make(number)
        self.serve(number)

    def each(self, do: Callable[[int], None], numbers: Iterable[int] = ()) -> None:
        """Call `do` for each of them, several concurrently."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(do, numbers or range(self.size)):
                pass

    def serving(self) -> int:
        """How many of them are Ready."""
        found = self.world.client.request("GET", "/apis/serving.quire.dev/v1alpha1/llmdeployments")["items"]
        conditions = [c for body in found for c in body.get("status", {}).get("conditions", ())]
        return sum(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def megabytes(pid: int, what: str = "VmRSS") -> float:
    """Memory of a process: VmRSS now, VmHWM at its highest."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(what))
    return int(line.split()[1]) / 1024


def reconciles(operator: OperatorProcess, result: str = "") -> float:
    """How many there were, with this result or with any."""
    prefix = f'quire_operator_reconcile_total{{result="{result}'
    return sum(value for name, value in operator.metrics().items() if name.startswith(prefix))


def wait_idle(operator: OperatorProcess, *, still: float = 3.0, seconds: float = 300) -> None:
    """Until it has reconciled nothing for `still` seconds."""
    last, since = -1.0, time.monotonic()

    def is_idle() -> bool:
        nonlocal last, since
        now = reconciles(operator)
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > still

    eventually(f"{operator.name} is idle", is_idle, seconds=seconds, poll=0.2)
