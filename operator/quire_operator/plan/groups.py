"""Groups of pods of an LLMDeployment on several nodes: when they start, and when their set is made anew.

LeaderWorkerSet recreates a group that crashes at once and without a limit. `status` counts that; here groups
that crash over and over wait before they load, for as long as a ConfigMap says that a pod reads at its start:
so another delay is no new revision. Pure.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.observed import Body, Observed, group_size
from quire_operator.resources import Manifest, start_delay
from quire_operator.spec import LLMDeployment


def with_start_delay(
    desired: tuple[Manifest, ...], model: LLMDeployment, observed: Observed
) -> tuple[Manifest, ...]:
    """The children, and the ConfigMap of the delay where there is one."""
    stored = observed.status.get("groups") or ()
    seconds = max((int(entry.get("startDelaySeconds") or 0) for entry in stored), default=0)
    if not model.is_grouped or not seconds:
        return desired
    return (*desired, start_delay.build(model, seconds))


def must_be_made_anew(manifest: Body, live: Body | None) -> bool:
    """Whether the set's groups get another size. LeaderWorkerSet would rebuild old groups in the new size."""
    if manifest["kind"] != names.GROUP_KIND or live is None:
        return False
    return group_size(manifest) != group_size(live)
