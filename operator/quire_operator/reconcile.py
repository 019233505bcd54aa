"""Reconciles one LLMDeployment: parse, build, observe, plan, execute, status.

Level-triggered: it gets a key and reads the current state, whatever event put the key into the queue. The
decisions are pure functions of `spec`, `resources`, `plan` and `status`; every request to the API server goes
through `cluster`. Keeps no state but the times of recent writes, which pace the next ones.
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
from quire_operator.plan import Plan, PlanInput, golden_tokens, make_plan, revisions
from quire_operator.plan.pacing import ApplyTimes
from quire_operator.plan.revisions import Revision
from quire_operator.pools import Place, Pools
from quire_operator.reports import printable
from quire_operator.resources import Manifest, RenderedRevision
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile, profiles
from quire_operator.status import Failure, RequestedAccelerator, transitions

logger = logging.getLogger(__name__)

# While an LLMDeployment is not settled it is reconciled this often: no watch covers everything it waits for
# (a volume that does not mount, the deletion of an object of another owner).
UNSETTLED_SECONDS = 10.0
GONE_SECONDS = 2.0  # between two looks whether the pods before it are gone, of one whose turn it is
WAITING_SECONDS = 10.0  # between two looks of one that waits: its requests may be gone, and so may others
PROGRESS_SECONDS = 10.0  # between status writes that only change the loading progress
TRANSIENT_SECONDS = 1.0  # within which intermediate states of a start are combined into one status write
# A status that keeps changing (two clients that scale back and forth) is written this often at most.
STATUS_AT_ONCE = 10
STATUS_WINDOW_SECONDS = 10.0

_SETTLED_PHASES = frozenset({"Serving", "Suspended", "Idle"})


@dataclass(frozen=True)
class ReconcileResult:
    """What a reconcile did. `requeue_after`: seconds until the next one is due without an event, None for
    never; `ready`: None where no pods are wanted; `cost_per_hour`: None without a price. `others`: those of
    its pool that have to start or stop a pod, and those of one that it has left; `swap`: the pool, and how
    long a turn took to begin that has now.
    """

    phase: str = ""
    plan: Plan = Plan()
    requeue_after: float | None = None
    ready: bool | None = None
    cost_per_hour: float | None = None
    others: tuple[Key, ...] = ()
    swap: tuple[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class _Revisions:
    """Which rendered revision is applied, in the terms of a StatefulSet's status.

    `update_revision`: the revision of the current spec. `current_revision`: what is applied, another one only
    after a rollback, for `rollback_reason`. `available_revision`: the name of what this release of the
    operator would render for the same spec, where that differs from the update revision.
    """

    update_revision: RenderedRevision
    current_revision: RenderedRevision
    history: tuple[Revision, ...]
    available_revision: str
    rollback_reason: str


class Reconciler:
    """`clock` is monotonic and paces writes; `now` gives the timestamps in the status."""

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
        self._pools = Pools(cluster, now)
        self._status_times: dict[Key, tuple[float, ...]] = {}
        self._apply_times: dict[Key, ApplyTimes] = {}

    async def __call__(self, key: Key) -> ReconcileResult:
        """Make the writes that bring `key` nearer to the desired state, and update its status. Of a pool one
        member at a time.
        """
        result = await self._reconcile(key)
        return replace(result, others=(*result.others, *self._pools.left_by(key)))

    async def _reconcile(self, key: Key) -> ReconcileResult:
        body = self._cluster.cache.get(names.KIND, key.namespace, key.name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._status_times.pop(key, None)
            self._apply_times.pop(key, None)
            return ReconcileResult()  # the garbage collector deletes the children
        try:
            model = spec.parse(body)
            accelerator = await self._accelerator(model)
            measurements = status.pod_measurements(body, self._autoscaler(model))
            rendered = resources.build(model, self._settings, measurements, **accelerator.profiles)
        except SpecError as error:
            return await self._refuse(key, body, Failure(reason="InvalidSpec", detail=printable(str(error))))
        if refusal := await self._refused_references(model):
            return await self._refuse(key, body, refusal)
        selected = await self._select_revisions(model, body, rendered, is_complete=not accelerator.error)
        if selected is None:
            return await self._refuse(key, body, Failure(reason="ProfileNotFound", detail=accelerator.error))
        desired = resources.with_revision(rendered, selected.current_revision)
        wanted = [ref(manifest) for manifest in desired]
        observed = await self._cluster.observe(body, wanted)
        if (awaited := golden_tokens.awaited(observed)) is not None:
            observed = await self._cluster.observe(body, [*wanted, awaited])
        problem = (
            status.ownership_conflict(observed)
            or status.missing_workload(model, observed)
            or status.missing_rights(observed)
        )
        returns_to = await self._may_return_to(model, desired, selected, observed)
        place = self._pools.place_of(key)
        given = self._plan_input(key, model, desired, selected, observed, returns_to)
        result = make_plan(given if place is None else replace(given, is_awake=place.is_awake))
        self._remember_applies(key, result.apply_times)
        if result.rollback_reason:
            problem = problem or Failure(reason="RolledBack", detail=result.rollback_reason)
        if result.plan:
            logger.info("%s/%s: %s", key.namespace, key.name, "; ".join(result.plan.details))
            problem = await self._execute(result.plan, key) or problem
            after = await self._cluster.observe(body)
            observed = replace(after, missing=observed.missing, forbidden=observed.forbidden)
        new = status.compute_status(
            model,
            observed,
            now=self._now(),
            problem=problem,
            available_revision=selected.available_revision,
            accelerator=accelerator,
            has_metrics_adapter=bool(self._settings.load_url),
            has_gateway=self._settings.has_gateway(model.namespace),
            turn=None if place is None else _turn_of(model, place),
        )
        written = await self._write_status(key, observed, new, result.plan)
        written = replace(written, cost_per_hour=status.cost_per_hour(accelerator, observed))
        return _in_pool(_due_earlier(written, result.requeue_after), key.name, place)

    def _plan_input(
        self,
        key: Key,
        model: LLMDeployment,
        desired: tuple[Manifest, ...],
        selected: _Revisions,
        observed: Observed,
        may_return_to: RenderedRevision | None,
    ) -> PlanInput:
        now = self._now()
        may_roll_back = model.spec.rollout.auto_rollback
        return PlanInput(
            model=model,
            desired=desired,
            observed=observed,
            now=now,
            update_revision=selected.update_revision,
            history=selected.history,
            rollback_reason=selected.rollback_reason,
            rollout_failure=status.rollout_failure(model, observed, now=now) if may_roll_back else "",
            may_return_to=may_return_to,
            has_gateway=self._settings.has_gateway(model.namespace),
            corrupt_pods=status.pods_with_corrupt_model(observed, now),
            apply_times=self._apply_times.get(key, {}),
            monotonic_now=self._clock(),
        )

    def _remember_applies(self, key: Key, times: ApplyTimes) -> None:
        if times:
            self._apply_times[key] = times
        else:
            self._apply_times.pop(key, None)

    async def _refuse(self, key: Key, body: Object, problem: Failure) -> ReconcileResult:
        """Change no child, and report the problem in the status. A pod of one whose turn is over ends."""
        place = self._pools.place_of(key, is_refused=True)
        observed = await self._cluster.observe(body)
        workload = observed.workload
        if place is not None and not place.is_awake and workload and workload["spec"].get("replicas") != 0:
            await self._cluster.stop_pods(workload)
        new = status.compute_refused_status(observed, problem, now=self._now())
        return _in_pool(await self._write_status(key, observed, new, Plan()), key.name, place)

    async def _refused_references(self, model: LLMDeployment) -> Failure | None:
        """What the spec names without being allowed to."""
        references = resources.restricted_references(model, self._settings)
        try:
            refused = await self._cluster.refused_references(model.namespace, references)
        except RejectedError as error:
            return Failure(reason="MissingRights", detail=printable(str(error)))
        if not refused:
            return None
        named = "; ".join(f"{one.field}: {one.kind} {one.name}" for one in refused)
        return Failure(reason="ReferenceRefused", detail=printable(named))

    async def _accelerator(self, model: LLMDeployment) -> RequestedAccelerator:
        """The AcceleratorProfiles that the spec names, of both roles, and why one cannot be used."""
        profile, error = await self._profile(model)
        prefill, its_error = (None, "") if model.prefill is None else await self._profile(model.prefill)
        return RequestedAccelerator(profile=profile, prefill_profile=prefill, error=error or its_error)

    async def _profile(self, model: LLMDeployment) -> tuple[Profile | None, str]:
        """The AcceleratorProfile that pods of a role have, and why it cannot be used; None and "" where they
        have none.
        """
        reference = model.spec.resources.profile_ref
        if reference is None:
            return None, ""
        try:
            body = await self._cluster.profile(reference.name)
            return (None, f"there is no {reference.name}") if body is None else (profiles.parse(body), "")
        except (RejectedError, SpecError) as error:
            return None, printable(str(error))

    async def _select_revisions(
        self, model: LLMDeployment, body: Object, rendered: Sequence[Manifest], *, is_complete: bool
    ) -> _Revisions | None:
        """Decides whether the stored revision is applied again or the one that is `rendered` now.

        `is_complete`: False where `rendered` lacks the fields of an AcceleratorProfile; the result is None
        then unless a stored revision serves this spec. A stored revision is read only where it differs from
        what is rendered. One whose pods fail and that was never rolled out is replaced, because newer
        defaults may fix it.
        """
        history = revisions.revision_history(self._cluster.revisions(body))
        fresh = update = resources.render_revision(model, body["spec"], rendered)
        may_adopt = is_complete and model.spec.rollout.adopt_operator_defaults == "Always"
        if history and history[-1].name != fresh.name and not may_adopt:
            stored = await self._stored_revision(model, history[-1].name)
            if stored is not None and resources.renders_same_pods(model, body, stored):
                observed = await self._cluster.observe(body)
                never_served = revisions.was_never_rolled_out(stored.name, observed)
                fails = never_served and status.has_failing_pods(model, observed, now=self._now())
                update = fresh if fails and is_complete else stored
        if update is fresh and not is_complete:
            return None
        rollback_to, reason = revisions.rollback_target(model, update.name, history)
        previous = await self._stored_revision(model, rollback_to) if rollback_to else None
        return _Revisions(
            update_revision=update,
            current_revision=previous or update,
            history=history,
            available_revision="" if update is fresh or not is_complete else fresh.name,
            rollback_reason=reason if previous else "",
        )

    async def _may_return_to(
        self, model: LLMDeployment, desired: Sequence[Manifest], selected: _Revisions, observed: Observed
    ) -> RenderedRevision | None:
        """The revision that a failed rollout would return to. Read only where there is something that only a
        rollback may need.
        """
        if observed.children.keys() <= {ref(manifest) for manifest in desired}:
            return None
        name = revisions.may_return_to(model, selected.update_revision.name, selected.history, observed)
        return await self._stored_revision(model, name) if name else None

    async def _stored_revision(self, model: LLMDeployment, name: str) -> RenderedRevision | None:
        data = await self._cluster.revision_data(model.namespace, name)
        found = resources.parse_stored(model, name, data)
        if found is None:
            logger.warning(
                "%s/%s: ControllerRevision %s is missing or invalid and is ignored",
                model.namespace,
                model.name,
                name,
            )
        return found

    def _autoscaler(self, model: LLMDeployment) -> Body | None:
        """Our HorizontalPodAutoscaler, or the one that KEDA creates for our ScaledObject."""
        name = f"keda-hpa-{model.name}" if model.autoscaler == "KEDA" else model.name
        return self._cluster.cache.get("HorizontalPodAutoscaler", model.namespace, name)

    async def _execute(self, plan: Plan, key: Key) -> Failure | None:
        """Execute the plan; a refusal of the API server is returned as a problem for the status, but for the
        golden tokens: pods serve without them, so a full quota of ConfigMaps makes none unready.
        """
        kept = Ref("ConfigMap", names.golden_tokens(key.name))
        needed = tuple(manifest for manifest in plan.apply if ref(manifest) != kept)
        optional = tuple(manifest for manifest in plan.apply if ref(manifest) == kept)
        try:
            await self._cluster.execute(replace(plan, apply=needed), key.namespace)
        except QuotaExceededError as error:
            return Failure(reason="QuotaExceeded", detail=printable(str(error)))
        except RejectedError as error:
            return Failure(reason="ApplyRejected", detail=printable(str(error)))
        except FailedError as error:
            return Failure(reason="ApplyFailed", detail=printable(str(error)))
        try:
            await self._cluster.execute(Plan(apply=optional), key.namespace)
        except (RejectedError, FailedError) as error:
            logger.warning("%s/%s: golden tokens are not kept: %s", key.namespace, key.name, error)
        return None

    async def _write_status(
        self, key: Key, observed: Observed, new: dict[str, Any], plan: Plan
    ) -> ReconcileResult:
        """Write the status in one patch if it changed, and record an Event for each transition."""
        phase = str(new.get("phase", ""))
        is_settled = phase in _SETTLED_PHASES and not status.changes_without_event(new)
        due_in = None if is_settled else UNSETTLED_SECONDS
        result = ReconcileResult(phase, plan, due_in, status.is_ready(new))
        patch = transitions.merge_patch(observed.status, new)
        if not patch:
            return result
        written = self._status_times.get(key, ())
        due = written[0] + STATUS_WINDOW_SECONDS if len(written) == STATUS_AT_ONCE else 0.0
        if written and transitions.is_progress_only(patch):
            due = max(due, written[-1] + PROGRESS_SECONDS)
        elif written and transitions.is_transient(observed.status, new):
            due = max(due, written[-1] + TRANSIENT_SECONDS)
        if (wait := due - self._clock()) > 0:
            return replace(result, requeue_after=wait)
        await self._cluster.patch_status(observed.body, patch)
        self._status_times[key] = (*written, self._clock())[-STATUS_AT_ONCE:]
        for event in transitions.events(observed.status, new):
            try:
                await self._cluster.record_event(observed.body, event)
            except ClusterError as error:  # not worth a retry: the status says the same
                logger.warning(
                    "%s/%s: Event %s was not recorded: %s", key.namespace, key.name, event.reason, error
                )
        return result


def _turn_of(model: LLMDeployment, place: Place) -> status.TurnState:
    """The place of a member in the terms of its status."""
    decided, name = place.schedule, model.name
    has_turn = decided.awake == name
    at, until = decided.turn_times.get(name), decided.behind.get(name)
    took = decided.turn.swap_seconds if decided.turn and has_turn else None
    waits = has_turn or name in decided.waiting
    return status.TurnState(
        pool=place.pool,
        state="Awake" if place.is_awake else "Waiting" if waits else "Asleep",
        awake=decided.awake,
        turn_at=None if at is None else datetime.fromtimestamp(at, UTC),
        behind_until=None if until is None else datetime.fromtimestamp(until, UTC),
        swap_seconds=took,
    )


def _in_pool(result: ReconcileResult, name: str, place: Place | None) -> ReconcileResult:
    """The result with what it means for the pool: when it is due again, and who else is."""
    if place is None:
        return result
    decided = place.schedule
    is_next = decided.awake == name and not place.is_awake
    due = [decided.due_in, GONE_SECONDS if is_next else None]
    due.append(WAITING_SECONDS if name in decided.waiting else None)
    for seconds in due:
        result = _due_earlier(result, seconds)
    swap = None if decided.swap_seconds is None else (place.pool, decided.swap_seconds)
    return replace(result, others=place.others, swap=swap)


def _due_earlier(result: ReconcileResult, due: float | None) -> ReconcileResult:
    """The same result, due after `due` seconds at the latest."""
    if due is None:
        return result
    known = result.requeue_after
    return replace(result, requeue_after=due if known is None else min(due, known))
