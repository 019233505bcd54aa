"""The operator is killed after every single write of a creation, an edit and a scaling, and while it deletes.

Whatever the last write was, the next process continues from there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from e2e.chaos.children import Body, children, differences, pods
from e2e.chaos.conftest import CREATED, SCALED, UPDATED, is_settled, settled
from e2e.operator.process import OperatorProcess
from e2e.operator.proxy import Proxy
from e2e.operator.world import NAME_LABEL, PATHS, World
from e2e.waiting import eventually
from quire_operator.cluster.kinds import CHILDREN

MOST_WRITES = 14  # more than any step takes


@pytest.mark.timeout(240)
@pytest.mark.chaos(1, fault="SIGKILL after the k-th write, for every k", proof="it died of signal 9")
@pytest.mark.parametrize(
    "k", [pytest.param(k, marks=[pytest.mark.api] if k == 4 else []) for k in range(1, MOST_WRITES + 1)]
)
def test_a_kill_after_any_write_is_completed_by_the_next_process(
    k: int,
    world: World,
    namespace: str,
    proxy: Proxy,
    start: Callable[..., OperatorProcess],
    undisturbed: dict[str, dict[str, Body]],
    record_property: Callable[[str, object], None],
) -> None:
    operator = start("killed", QUIRE_WATCH_NAMESPACES=namespace)
    kept: set[str] = set()
    killed = []
    for step, edit in (("created", CREATED), ("updated", UPDATED), ("scaled", SCALED)):
        operator.wait_leading(world)
        kill_after(k, proxy, operator)
        if step == "created":
            world.deploy(namespace, "m", **edit)
        else:
            world.patch("LLMDeployment", namespace, "m", {"spec": dict(edit)})

        def is_done(step: str = step) -> bool:
            return operator.code is not None or (
                children(world, namespace, "m") == undisturbed[step] and is_settled(world, namespace)
            )

        eventually(f"{step}, or a kill", is_done)
        proxy.written = lambda: None
        if operator.ask("/healthz")[0] != 200:
            killed.append(step)
            assert operator.wait(5) == -signal.SIGKILL
            operator.start().wait_leading(world)
            eventually(
                f"{step} after the kill",
                lambda step=step: children(world, namespace, "m") == undisturbed[step],  # type: ignore[misc]  # mypy infers no lambda that has a default
            )
        assert differences(settled(world, namespace), undisturbed[step]) == []
        now = pods(world, namespace, "m")
        assert kept <= now, "no pod was replaced"
        kept = now
    assert killed or k > 8, "the fault took effect"
    assert not (killed and k == MOST_WRITES), "every write was the last one once"
    operator.kill()
    world.delete("LLMDeployment", namespace, "m")
    others = {kind.kind for kind in CHILDREN if kind.optional}  # not installed here
    operator.start().wait_leading(world)
    kinds = PATHS.keys() - {"LLMDeployment", "Lease", "Event", *others}
    eventually(
        "no orphans",
        lambda: not any(world.find(kind, namespace, f"{NAME_LABEL}=m") for kind in kinds),
    )
    record_property("measured", f"k={k}: {', '.join(killed) or 'no write left'}")


def kill_after(writes: int, proxy: Proxy, operator: OperatorProcess) -> None:
    """Kills the operator after so many of its writes, before it gets the answer to the last."""
    done = 0

    def written() -> None:
        nonlocal done
        done += 1
        if done == writes:
            os.kill(operator.pid, signal.SIGKILL)

    proxy.written = written
