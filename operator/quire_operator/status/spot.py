"""The condition DrainFitsNotice: whether a pod on a spot node has ended its drain before the node is gone.

It only warns. A drain is also that of a rollout, and an owner who wants it longer there may accept that
answers on a node that is reclaimed break off. Pure.
"""

from __future__ import annotations

from quire_operator.observed import Body, pod_template
from quire_operator.resources.placement import may_run_on_spot_nodes
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons
from quire_operator.status.accelerator_fit import RequestedAccelerator
from quire_operator.status.reasons import ConditionValue


def condition(
    model: LLMDeployment, requested: RequestedAccelerator, deployment: Body | None
) -> ConditionValue | None:
    """None where the pods' placement names no spot nodes. The pods may be of a revision that an earlier
    release rendered, so the grace period of the Deployment counts where there is one.
    """
    if not any(may_run_on_spot_nodes(one, requested.of_role(one.role)) for one in model.roles):
        return None
    notice, wanted = model.spec.scheduling.spot.notice_seconds, model.termination_grace_period_seconds
    template = pod_template(deployment or {})
    grace = int((template.get("spec") or {}).get("terminationGracePeriodSeconds") or wanted)
    detail = f"pods end within {grace} seconds of their deletion, and the notice is {notice} seconds"
    if grace <= notice:
        return "True", "Fits", f"{detail[0].upper()}{detail[1:]}."
    if wanted <= notice:
        detail += "; the next edit of the spec corrects it, such as a new rollout.restartId"
    return "False", "DrainExceedsNotice", reasons.message("DrainExceedsNotice", detail)
