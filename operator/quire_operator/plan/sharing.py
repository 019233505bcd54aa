"""Which of the LLMDeployments that share an accelerator has its turn, and when the next one's begins.

The one that has it keeps it until another one is waited for. Then it has the rest of its minimum stay while
it has requests itself, and none without. Of those that wait the one comes next that has waited longest. One
whose turn ended before its pod was ready is not waited for until the others have had the accelerator for as
long: it would have it for most of the time otherwise, and serve none. No pod starts before those of all
others are gone. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from quire_operator.observed import Body, Observed, Ref, has_ended, is_ready, ref
from quire_operator.plan.scale_to_zero import DEMAND_SECONDS
from quire_operator.reports import STALE_SECONDS
from quire_operator.resources import Manifest
from quire_operator.spec import LLMDeployment

#: How long a model without a request counts as one that has some.
QUIET_SECONDS = 10.0
#: How long after its grace period a pod is waited for.
LOST_SECONDS = 60.0
#: After failed turns in a row a member is put behind for 1, 2, and then 4 times its `start_seconds`.
MOST_DOUBLINGS = 2


@dataclass(frozen=True, kw_only=True)
class Member:
    """One of them. All times are Unix times.

    `may_run`: it is not suspended, and its spec is valid. `stay_seconds`: how long its turn lasts at least
    while it has requests. `start_seconds`: within which its pod is ready, or its turn is over where others
    wait. `has_pod`: one is wanted, runs or ends. `is_wanted`: its Deployment is to run one. `ready_since`:
    None where no pod is. `busy_until`: when it will have been without requests for long enough, None where
    that is not known. `waiting_since`: when a gateway began to hold requests for it, None where none does.
    `generation`: that of its spec.
    """

    name: str
    created: str = ""
    may_run: bool = True
    stay_seconds: float = 60.0
    start_seconds: float = 1800.0
    is_wanted: bool = False
    has_pod: bool = False
    started_at: float | None = None
    ready_since: float | None = None
    busy_until: float | None = None
    waiting_since: float | None = None
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class FailedTurns:
    """The turns of a member in a row that were over before its pod was ready, the last one at `at`; and the
    `generation` of its spec in them.
    """

    number: int
    at: float
    generation: int

    def behind_until(self, start_seconds: float) -> float:
        """When it is waited for again."""
        return self.at + start_seconds * 2.0 ** min(self.number - 1, MOST_DOUBLINGS)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Whose turn it is. `since`: when that was decided. `started_at`: when it was seen to run first, and
    `ready_at`: when its pod was ready first. `swap_seconds`: from the decision until then, None where none
    had the turn before. `ended`: when the turns of others were over, and `failed`: those that have failed.
    """

    member: str
    since: float
    started_at: float | None = None
    ready_at: float | None = None
    is_swap: bool = False
    swap_seconds: float | None = None
    ended: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, FailedTurns] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What follows for the members. `is_free`: the pods of all others are gone, and what ended of its own.
    `waiting`: whose requests wait, in the order of their turns, and `turn_times`: when these begin at the
    latest, without loads and drains. `behind`: those of them that are put behind, and until when. `due_in`:
    seconds until this may change without an event.
    `swap_seconds`: of a swap that ended now.
    """

    turn: Turn | None
    is_free: bool
    waiting: tuple[str, ...] = ()
    turn_times: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    due_in: float | None = None
    swap_seconds: float | None = None
    runs: frozenset[str] = frozenset()  # those that are wanted to run a pod now

    @property
    def awake(self) -> str:
        """The name of the member that has the turn; empty where none may run."""
        return "" if self.turn is None else self.turn.member

    def is_awake(self, name: str) -> bool:
        """Whether this member is to have a pod: it keeps the one that it has, or the accelerator is free."""
        return name == self.awake and (self.is_free or name in self.runs)

    def to_change(self) -> frozenset[str]:
        """The members that have a pod too many or lack one."""
        wanted = {name for name in [self.awake] if name and self.is_awake(name)}
        return frozenset(wanted ^ self.runs)


def schedule(
    members: Iterable[Member], last: Turn | None, now: float, *, has_others: bool = False
) -> Schedule:
    """`last`: the turn as it was decided last, None after a restart. `has_others`: pods of the pool are there
    that belong to no member any more.
    """
    found = {member.name: member for member in members}
    able = {name: member for name, member in found.items() if member.may_run}
    if not able:
        return Schedule(turn=None, is_free=False, runs=_running(found))
    last = None if last is None else _without_old(last, found, now)
    turn = last if last is not None and last.member in able else _first(able, last, now)
    holder = able[turn.member]
    was_ready = turn.ready_at is not None
    turn = _with_progress(turn, holder, now, is_free=not has_others and _is_free_for(holder, found))
    behind = _behind(able, turn, now)
    waiting = _waiting(able, turn, behind)
    if waiting and _ends_at(holder, turn) <= now:
        ended, failed = {**turn.ended, holder.name: now}, _failed_after(turn, holder, now)
        turn = Turn(member=waiting[0].name, since=now, is_swap=True, ended=ended, failed=failed)
        holder, behind = waiting[0], _behind(able, turn, now)
        waiting = _waiting(able, turn, behind)
    due = [*([_ends_at(holder, turn)] if waiting else []), *behind.values()]
    until_due = min(due, default=math.inf) - now
    turns = [*((one, now) for one in waiting), *((able[name], at) for name, at in behind.items())]
    return Schedule(
        turn=turn,
        is_free=not has_others and _is_free_for(holder, found),
        waiting=tuple(one.name for one, _ in turns),
        turn_times=_turn_times(turns, turn, holder),
        behind=behind,
        due_in=max(0.0, until_due) if until_due < math.inf else None,
        swap_seconds=None if was_ready else turn.swap_seconds,
        runs=_running(found),
    )


def _without_old(turn: Turn, found: Mapping[str, Member], now: float) -> Turn:
    """The turn without what it has of members that are gone, failures of specs that have changed since, and
    times to come.
    """
    ended = {name: min(at, now) for name, at in turn.ended.items() if name in found}
    failed = {
        name: replace(one, at=min(one.at, now))
        for name, one in turn.failed.items()
        if name in found and found[name].generation == one.generation
    }
    return replace(turn, ended=ended, failed=failed)


def _is_free_for(holder: Member, found: Mapping[str, Member]) -> bool:
    """Whether the pods of all others are gone, and what ended of its own."""
    return not any(one.has_pod for one in found.values() if one != holder or not one.is_wanted)


def _with_progress(turn: Turn, holder: Member, now: float, *, is_free: bool) -> Turn:
    """The turn with what its pod has reached. From when it may start its time runs, whether it can or not."""
    if turn.started_at is None and (holder.is_wanted or is_free):
        turn = replace(turn, started_at=now)
    if turn.ready_at is not None or not holder.is_wanted or holder.ready_since is None:
        return turn
    at = now if turn.is_swap else min(now, max(holder.ready_since, turn.since))
    failed = {name: one for name, one in turn.failed.items() if name != holder.name}
    return replace(turn, ready_at=at, swap_seconds=at - turn.since if turn.is_swap else None, failed=failed)


def _running(found: Mapping[str, Member]) -> frozenset[str]:
    return frozenset(name for name, member in found.items() if member.is_wanted)


def _first(able: Mapping[str, Member], last: Turn | None, now: float) -> Turn:
    """The turn where none is known: of a member that runs, ready ones first, else of the one that is waited
    for longest, else of the oldest.
    """
    ended = {} if last is None else {**last.ended, last.member: now}
    failed = {} if last is None else last.failed
    running = [one for one in able.values() if one.is_wanted]
    if running:
        one = min(running, key=lambda each: (each.ready_since is None, each.created, each.name))
        since = now if one.started_at is None else one.started_at
        return Turn(member=one.name, since=since, started_at=since, ended=ended, failed=failed)
    asked = [one for one in able.values() if one.waiting_since is not None]
    if asked:
        one = min(asked, key=lambda each: (each.name in failed, each.waiting_since, each.name))
    else:
        one = min(able.values(), key=lambda each: (each.created, each.name))
    return Turn(member=one.name, since=now, is_swap=last is not None, ended=ended, failed=failed)


def _waiting(able: Mapping[str, Member], turn: Turn, behind: Mapping[str, float]) -> list[Member]:
    """Those whose requests wait and who are not put behind, longest first. What waited before a turn of its
    own waits anew after it.
    """
    asked = [
        (max(one.waiting_since, turn.ended.get(one.name, 0.0)), one.name)
        for one in able.values()
        if one.waiting_since is not None and one.name != turn.member and one.name not in behind
    ]
    return [able[name] for _, name in sorted(asked)]


def _behind(able: Mapping[str, Member], turn: Turn, now: float) -> dict[str, float]:
    """Those whose requests wait though their last turns have failed, and until when they are put behind; the
    first one first.
    """
    untils = [
        (failed.behind_until(able[name].start_seconds), name)
        for name, failed in turn.failed.items()
        if name in able and able[name].waiting_since is not None and name != turn.member
    ]
    return {name: until for until, name in sorted(untils) if until > now}


def _failed_after(turn: Turn, holder: Member, now: float) -> Mapping[str, FailedTurns]:
    """The failures once this turn is over. That its clients were gone before its time was over is none."""
    if turn.ready_at is not None or turn.started_at is None or now < turn.started_at + holder.start_seconds:
        return turn.failed
    known = turn.failed.get(holder.name)
    number = 1 if known is None else known.number + 1
    return {**turn.failed, holder.name: FailedTurns(number=number, at=now, generation=holder.generation)}


def _ends_at(holder: Member, turn: Turn) -> float:
    """When the turn ends where another member waits. Before its pod could start, which is when the pods
    before it are gone, only where it is not waited for any more. Until it is ready likewise, where it has the
    turn because there was no other, as after a restart.
    """
    if turn.started_at is None or (turn.ready_at is None and not turn.is_swap):
        is_awaited = holder.waiting_since is not None
        if turn.started_at is None or not is_awaited:
            return math.inf if is_awaited else 0.0
    if turn.ready_at is None:
        return turn.started_at + holder.start_seconds
    stay = turn.ready_at + holder.stay_seconds
    return stay if holder.busy_until is None else min(stay, max(turn.ready_at, holder.busy_until))


def _turn_times(turns: Iterable[tuple[Member, float]], turn: Turn, holder: Member) -> dict[str, float]:
    """By the minimum stays alone, and not before the time of each; empty until the holder's has begun."""
    if turn.ready_at is None:
        return {}
    times, at = {}, turn.ready_at + holder.stay_seconds
    for one, earliest in turns:
        times[one.name] = max(at, earliest)
        at = times[one.name] + one.stay_seconds
    return times


def member(
    model: LLMDeployment | None,
    observed: Observed,
    waiting_since: float,
    now: datetime,
    *,
    is_refused: bool = False,
) -> Member:
    """One of the pool as it is. `model`: None where its spec is not valid. `waiting_since`: when its gateway
    began to ask, in Unix time. `is_refused`: what belongs to it cannot be applied now. Such a one keeps its
    turn while it runs and none waits, and gets no other.
    """
    metadata, workload = observed.body["metadata"], observed.workload or {}
    pods = [pod for pod in observed.pods if not has_ended(pod) and not is_lost(pod, now)]
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    is_wanted = bool(workload) and (workload.get("spec") or {}).get("replicas", 1) != 0
    is_asked = now.timestamp() - observed.demanded_at < DEMAND_SECONDS
    settings = {} if model is None else _settings(model)
    return Member(
        name=observed.name,
        created=str(metadata.get("creationTimestamp", "")),
        may_run="deletionTimestamp" not in metadata
        and (is_wanted if model is None or is_refused else bool(model.replicas)),
        is_wanted=is_wanted,
        has_pod=is_wanted or bool(pods) or _may_start_pods(observed),
        started_at=min((_time(pod["metadata"].get("creationTimestamp")) for pod in staying), default=None),
        ready_since=min((_ready_since(pod) for pod in staying if is_ready(pod)), default=None),
        busy_until=_busy_until(staying, observed, now),
        waiting_since=waiting_since if is_asked else None,
        generation=int(metadata.get("generation") or 0),
        **settings,
    )


def is_lost(pod: Body, now: datetime) -> bool:
    """Whether it should have ended long ago: its node does not say that it has, and may never. The scheduler
    counts its devices until then.
    """
    until = pod["metadata"].get("deletionTimestamp")  # the end of its grace period
    return until is not None and now.timestamp() > _time(until) + LOST_SECONDS


def with_replicas(
    desired: Iterable[Manifest], model: LLMDeployment, observed: Observed, is_awake: bool | None
) -> tuple[Manifest, ...]:
    """`desired` with one pod or none in the Deployment of a member. `is_awake`: None where the other
    members are not known; then the number stays.
    """
    if model.spec.sharing is None or not model.replicas:
        return tuple(desired)
    live = observed.workload
    if is_awake is None:
        is_awake = live is None or (live.get("spec") or {}).get("replicas", 1) != 0
    target = Ref("Deployment", model.workload_name)
    return tuple(
        {**one, "spec": {**one["spec"], "replicas": int(is_awake)}} if ref(one) == target else one
        for one in desired
    )


def _settings(model: LLMDeployment) -> dict[str, float]:
    sharing = model.spec.sharing
    assert sharing is not None
    return {
        "stay_seconds": float(sharing.minimum_stay_seconds),
        "start_seconds": float(model.spec.health.startup_timeout_seconds),
    }


def _may_start_pods(observed: Observed) -> bool:
    """Whether a controller has not seen yet that no pod is wanted: it may still make one."""
    makers = [one for one in (observed.workload, *observed.replica_sets) if one is not None]
    return any(
        int((one.get("status") or {}).get("replicas") or 0)
        or int((one.get("status") or {}).get("observedGeneration") or 0)
        < int(one["metadata"].get("generation") or 0)
        or (one["kind"] == "ReplicaSet" and (one.get("spec") or {}).get("replicas", 1))
        for one in makers
    )


def _busy_until(pods: Iterable[Body], observed: Observed, now: datetime) -> float | None:
    """When its pod will have been without requests for `QUIET_SECONDS`, and no gateway will have asked for
    it; None where that is not known of a pod.
    """
    until = observed.demanded_at + DEMAND_SECONDS if observed.demanded_at else 0.0
    for pod in pods:
        sample = observed.samples.get(str(pod["metadata"]["uid"]))
        if not is_ready(pod) or sample is None or sample.quiet_since is None:
            return None
        if now.timestamp() - sample.asked_at > STALE_SECONDS:
            return None
        if sample.asked_at - sample.quiet_since < QUIET_SECONDS:
            return None  # it had one a moment ago: between two looks there may have been others
        until = max(until, sample.quiet_since + QUIET_SECONDS)
    return until


def _ready_since(pod: Body) -> float:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((_time(c.get("lastTransitionTime")) for c in conditions if c.get("type") == "Ready"), 0.0)


def _time(text: str | None) -> float:
    """A timestamp of the API server in Unix time, 0 for none: only that of a condition may be absent."""
    return 0.0 if text is None else datetime.fromisoformat(text).timestamp()
