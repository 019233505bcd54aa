"""One LLMDeployment from what it is to what it should be: parse, build, observe, plan, execute, status.

Called by the workers with a key and nothing else (level-triggered: what happened does not matter, only what
is). Decisions are made by pure functions; what reaches the API server goes through `cluster`. Keeps nothing
that matters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator import names, resources, spec, status
from quire_operator.cluster import (
    Cluster,
    ClusterError,
    FailedError,
    Key,
    Object,
    QuotaExceededError,
    RejectedError,
)
from quire_operator.errors import SpecError
from quire_operator.observed import Body, Observed, Ref, ref
from quire_operator.plan import Plan, decider, make_plan, revisions, strategy, with_renewals
from quire_operator.plan.revisions import Revision
from quire_operator.reports import printable
from quire_operator.resources import Kept, Manifest
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile, profiles
from quire_operator.status import Failure, transitions

logger = logging.getLogger(__name__)

# What no watch tells of (a volume that does not mount, a foreign object that is gone) is looked at again.
UNSETTLED_SECONDS = 10.0
PROGRESS_SECONDS = 10.0
# The same manifest applied so often means that somebody else keeps changing it: then repair more slowly.
REPAIRS_AT_ONCE = 5
REPAIR_WINDOW_SECONDS = 60.0
PASSING_SECONDS = 1.0  # what a start passes through within it is told in one write
# A status that changes without end (somebody scales back and forth) is written this often at most.
STATUS_AT_ONCE = 10
STATUS_WINDOW_SECONDS = 10.0

_SETTLED_PHASES = frozenset({"Serving", "Suspended", "Idle"})


@dataclass(frozen=True)
class Outcome:
    """What a reconcile did. `again_after`: seconds after which it is due without an event. `ready`: None
    where no pods are wanted.
    """

    phase: str = ""
    plan: Plan = Plan()
    again_after: float | None = None
    ready: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Render:
    """`asked`: what the spec stands for. `newer`: name of what this operator would render for it, if that is
    something else.
    """

    asked: Kept
    in_force: Kept
    past: tuple[Revision, ...]
    newer: str
    rolled_back: str  # why something else is in force, if so


class Reconciler:
    """`clock` is monotonic and paces writes, `now` is what stands in the status."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._now = now
        self._written_at: dict[Key, tuple[float, ...]] = {}
        self._applied_at: dict[Key, dict[tuple[Ref, str], tuple[float, ...]]] = {}

    async def __call__(self, key: Key) -> Outcome:
        """Bring `key` one step nearer to what it should be, and write down how it is."""
        body = self._cluster.cache.get(names.KIND, key.namespace, key.name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._written_at.pop(key, None)
            self._applied_at.pop(key, None)
            return Outcome()  # garbage collection takes the children along
        try:
            model = spec.parse(body)
            profile, lacks = await self._profile(model)
            measured = status.measured(body, self._autoscaler(model))
            fresh = resources.build(model, self._settings, measured, profile)
        except SpecError as error:
            return await self._refuse(key, body, Failure(reason="InvalidSpec", detail=printable(str(error))))
        render = await self._render(model, body, fresh, is_whole=not lacks)
        if render is None:
            return await self._refuse(key, body, Failure(reason="ProfileNotFound", detail=lacks))
        desired = resources.with_kept(fresh, render.in_force)
        observed = await self._cluster.observe(body, [ref(manifest) for manifest in desired])
        problem = status.ownership_conflict(observed) or status.missing_rights(observed)
        desired = strategy.settled(desired, model, observed, self._now())
        plan = make_plan(desired, observed, decider(model, observed))
        now = self._now()
        plan = with_renewals(plan, desired, observed, status.found_corrupt(observed, now), now)
        plan = revisions.writes(plan, model, render.asked, render.past, observed)
        may_give_up = model.spec.rollout.auto_rollback
        why = status.failed_rollout(model, observed, now=self._now()) if may_give_up else ""
        gives_up = revisions.give_up(model, render.asked.name, render.past, observed, why)
        plan, due = (gives_up, 0.0) if gives_up else self._paced(key, plan)
        if given_up := render.rolled_back or (why if gives_up else ""):
            problem = problem or Failure(reason="RolledBack", detail=given_up)
        if plan:
            logger.info("%s/%s: %s", key.namespace, key.name, "; ".join(plan.details))
            problem = await self._execute(plan, key) or problem
            after = await self._cluster.observe(body)
            observed = replace(after, missing=observed.missing, forbidden=observed.forbidden)
        target = status.Target(profile=profile, lacks=lacks)
        new = status.of(model, observed, now=self._now(), problem=problem, newer=render.newer, target=target)
        outcome = await self._report(key, observed, new, plan)
        return outcome if due is None else replace(outcome, again_after=min(due, outcome.again_after or due))

    async def _refuse(self, key: Key, body: Object, problem: Failure) -> Outcome:
        """Touch no child, and say why."""
        observed = await self._cluster.observe(body)
        return await self._report(key, observed, status.refused(observed, problem, now=self._now()), Plan())

    async def _profile(self, model: LLMDeployment) -> tuple[Profile | None, str]:
        """The AcceleratorProfile that the spec names, if it names one, or why it cannot be had."""
        reference = model.spec.resources.profile_ref
        if reference is None:
            return None, ""
        try:
            body = await self._cluster.profile(reference.name)
            return (None, f"there is no {reference.name}") if body is None else (profiles.parse(body), "")
        except (RejectedError, SpecError) as error:
            return None, printable(str(error))

    async def _render(
        self, model: LLMDeployment, body: Object, fresh: Sequence[Manifest], *, is_whole: bool
    ) -> _Render | None:
        """What of the children stays as it was rendered, and what is rendered anew. None where nothing was
        kept for this spec, and `fresh` is not whole: it lacks what an AcceleratorProfile says.

        What is stored is read only where it differs from what would be rendered now. What fails and
        never served is not worth keeping: a newer default may be what mends it.
        """
        past = revisions.history(self._cluster.revisions(body))
        now = asked = resources.kept(model, body["spec"], fresh)
        may_adopt = is_whole and model.spec.rollout.adopt_operator_defaults == "Always"
        if past and past[-1].name != now.name and not may_adopt:
            newest = await self._stored(model, past[-1].name)
            if newest is not None and resources.is_same(model, body, newest):
                observed = await self._cluster.observe(body)
                never_served = revisions.is_unfinished(newest.name, observed)
                fails = never_served and status.is_failing(model, observed, now=self._now())
                asked = now if fails and is_whole else newest
        if asked is now and not is_whole:
            return None
        back, why = revisions.rollback(model, asked.name, past)
        before = await self._stored(model, back) if back else None
        return _Render(
            asked=asked,
            in_force=before or asked,
            past=past,
            newer="" if asked is now or not is_whole else now.name,
            rolled_back=why if before else "",
        )

    async def _stored(self, model: LLMDeployment, name: str) -> Kept | None:
        found = resources.stored(model, name, await self._cluster.kept(model.namespace, name))
        if found is None:
            logger.warning("%s/%s: ControllerRevision %s is not used", model.namespace, model.name, name)
        return found

    def _autoscaler(self, model: LLMDeployment) -> Body | None:
        """Ours, or the one that KEDA made of our ScaledObject and names so."""
        name = f"keda-hpa-{model.name}" if model.autoscaler == "KEDA" else model.name
        return self._cluster.cache.get("HorizontalPodAutoscaler", model.namespace, name)

    async def _execute(self, plan: Plan, key: Key) -> Failure | None:
        """Carry out the plan; what the API server refuses is a problem to be told of."""
        try:
            await self._cluster.execute(plan, key.namespace)
        except QuotaExceededError as error:
            return Failure(reason="QuotaExceeded", detail=printable(str(error)))
        except RejectedError as error:
            return Failure(reason="ApplyRejected", detail=printable(str(error)))
        except FailedError as error:
            return Failure(reason="ApplyFailed", detail=printable(str(error)))
        return None

    async def _report(self, key: Key, observed: Observed, new: dict[str, Any], plan: Plan) -> Outcome:
        """Write the status in one patch if it changed, and tell Events of what changed."""
        phase = str(new.get("phase", ""))
        is_settled = phase in _SETTLED_PHASES and not status.awaits_others(new)
        due_in = None if is_settled else UNSETTLED_SECONDS
        outcome = Outcome(phase, plan, due_in, status.is_ready(new))
        patch = transitions.merge_patch(observed.status, new)
        if not patch:
            return outcome
        written = self._written_at.get(key, ())
        due = written[0] + STATUS_WINDOW_SECONDS if len(written) == STATUS_AT_ONCE else 0.0
        if written and transitions.is_progress_only(patch):
            due = max(due, written[-1] + PROGRESS_SECONDS)
        elif written and transitions.is_in_passing(observed.status, new):
            due = max(due, written[-1] + PASSING_SECONDS)
        if (wait := due - self._clock()) > 0:
            return replace(outcome, again_after=wait)
        await self._cluster.patch_status(observed.body, patch)
        self._written_at[key] = (*written, self._clock())[-STATUS_AT_ONCE:]
        for event in transitions.events(observed.status, new):
            try:
                await self._cluster.tell(observed.body, event)
            except ClusterError as error:  # an Event is worth no second reconcile: the status says the same
                logger.warning("%s/%s: Event %s not told: %s", key.namespace, key.name, event.reason, error)
        return outcome

    def _paced(self, key: Key, plan: Plan) -> tuple[Plan, float | None]:
        """Without the manifests that were applied so often lately that somebody else must be undoing it, and
        the seconds until the first of these is due.
        """
        now = self._clock()
        times = self._applied_at.pop(key, {})
        recent = {
            one: kept
            for one, at in times.items()
            if (kept := tuple(t for t in at if t >= now - REPAIR_WINDOW_SECONDS))
        }
        apply, waits = [], []
        for manifest in plan.apply:
            identity = (ref(manifest), manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED_HASH])
            at = recent.get(identity, ())
            wait = at[-1] + UNSETTLED_SECONDS - now if len(at) >= REPAIRS_AT_ONCE else 0.0
            if wait > 0:
                waits.append(wait)
            else:
                recent[identity] = (*at, now)
                apply.append(manifest)
        if recent:
            self._applied_at[key] = recent
        return replace(plan, apply=tuple(apply)), min(waits, default=None)
