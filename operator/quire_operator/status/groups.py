"""The groups of pods of an LLMDeployment on several nodes: how complete each is, and how often it was
recreated.

LeaderWorkerSet recreates a group without a limit, once a second if need be, and holds the nodes of a group of
which some pods find no place. So both are found here, from the pods. How often a group was recreated cannot
be observed again, so the stored status is where it is counted. Pure; decides about no pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator import names, reports
from quire_operator.observed import Body, Observed, group_index, revision_of, seconds_since
from quire_operator.reports import Sample
from quire_operator.spec import LLMDeployment
from quire_operator.status.pods import Failure, PodState

INCOMPLETE_SECONDS = 120.0
CRASH_LOOP_RECREATIONS = 5
CRASH_LOOP_SECONDS = 600.0
FIRST_DELAY_SECONDS = 10
LONGEST_DELAY_SECONDS = 640
MAX_GROUPS = 64  # in the status


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """`leader`: uid of the leader's pod, which identifies one life of the group. `recreations`: when it was
    recreated, the last ones. `waiting`: why the first of its pods that has no node has none.
    """

    index: int
    size: int
    ready: int
    leader: str
    revision: str
    created: str
    states: tuple[PodState, ...]
    slowest_rank: int | None = None
    recreations: tuple[str, ...] = ()
    start_delay: int = 0

    @property
    def placed(self) -> int:
        """How many pods have a node."""
        return sum(state.scheduled for state in self.states)

    @property
    def is_ready(self) -> bool:
        """Whether all its pods are."""
        return self.ready == self.size

    @property
    def phase(self) -> str:
        """One word for a reader."""
        if self.start_delay and not self.is_ready:
            return "CrashLoop"
        if self.is_ready:
            return "Serving"
        if self.placed < self.size:
            return "Pending"
        return "Failing" if any(state.failure is not None for state in self.states) else "Loading"


def read(
    model: LLMDeployment, observed: Observed, states: Sequence[PodState], now: datetime
) -> list[GroupState]:
    """All groups by index, also one whose pods are being replaced. `states`: of all pods."""
    if not model.is_grouped:
        return []
    by_name = {state.name: state for state in states}
    samples = observed.samples
    stored = {entry.get("index"): entry for entry in observed.status.get("groups") or ()}
    leaders = {group_index(pod): pod for pod in observed.pods if group_index(pod) >= 0}
    wanted = int(((observed.child(names.GROUP_KIND) or {}).get("spec") or {}).get("replicas", 0))
    awaited = {index for index in stored if isinstance(index, int) and index < wanted}
    return [
        _counted(
            _group(model, leaders[index], observed.workers, by_name, samples), stored.get(index) or {}, now
        )
        if index in leaders
        else _between_lives(stored[index])
        for index in sorted(leaders.keys() | awaited)
    ]


def _between_lives(stored: Mapping[str, Any]) -> GroupState:
    """A group without a leader's pod, with what was counted of its lives so far."""
    return GroupState(
        index=int(stored["index"]),
        size=int(stored.get("pods") or 0),
        ready=0,
        leader=str(stored.get("leader", "")),
        revision=str(stored.get("revision", "")),
        created="",
        states=(),
        recreations=tuple(map(str, stored.get("recreations") or ())),
        start_delay=int(stored.get("startDelaySeconds") or 0),
    )


def _group(
    model: LLMDeployment,
    leader: Body,
    workers: Sequence[Body],
    states: Mapping[str, PodState],
    samples: Mapping[str, Sample],
) -> GroupState:
    index = group_index(leader)
    pods = [leader, *(pod for pod in workers if group_index(pod) == index)]
    found = tuple(states[str(pod["metadata"]["name"])] for pod in pods)
    heard = [samples[uid] for pod in pods if (uid := str(pod["metadata"]["uid"])) in samples]
    size, ready = model.spec.parallelism.nodes, sum(state.ready for state in found)
    return GroupState(
        index=index,
        size=size,
        ready=ready,
        leader=str(leader["metadata"]["uid"]),
        revision=revision_of(leader),
        created=str(leader["metadata"].get("creationTimestamp", "")),
        states=found,
        slowest_rank=_slow_while_serving(leader, samples) if ready == size else _slowest(heard),
    )


def _slowest(heard: Sequence[Sample]) -> int | None:
    """The rank for which the others of a group that is not ready wait."""
    slowest = reports.slowest_rank(reports.merged_ranks([sample.ranks for sample in heard]))
    return None if slowest is None else slowest.rank


def _slow_while_serving(leader: Body, samples: Mapping[str, Sample]) -> int | None:
    sample = samples.get(str(leader["metadata"]["uid"]))
    return None if sample is None else sample.slow_rank


def _counted(group: GroupState, stored: Mapping[str, Any], now: datetime) -> GroupState:
    """The group with the recreations of its revision. One that serves for as long as they are counted has
    recovered.
    """
    if stored.get("revision") != group.revision:
        return group
    delay = int(stored.get("startDelaySeconds") or 0)
    # The longer each group waits before it starts, the longer the time in which they are counted.
    window = CRASH_LOOP_SECONDS + CRASH_LOOP_RECREATIONS * delay
    times = [str(time) for time in stored.get("recreations") or ()]
    recent = [time for time in times if seconds_since(time, now) < window]
    is_new = stored.get("leader") != group.leader
    if is_new:
        recent.append(now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    if len(recent) < CRASH_LOOP_RECREATIONS:
        delay = 0
    elif is_new or not delay:
        delay = min(2 * delay or FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS)
    return replace(group, recreations=tuple(recent[-CRASH_LOOP_RECREATIONS:]), start_delay=delay)


def failure(groups: Sequence[GroupState], now: datetime) -> Failure | None:
    """What is wrong with a group as a whole, the first one: a crash loop before an incomplete group."""
    looping = next((group for group in groups if group.start_delay and not group.is_ready), None)
    if looping is not None:
        causes = [state.ended or state.failure for state in looping.states]
        cause = next((one for one in causes if one is not None), None)
        said = f": {cause.reason} in pod {cause.pod}" if cause is not None else ""
        detail = f"group {looping.index} waits {looping.start_delay} s before it starts again{said}"
        return Failure(reason="GroupCrashLoop", detail=detail, count=len(looping.recreations))
    texts = [text for group in groups if (text := _incomplete(group, now))]
    return Failure(reason="GroupIncomplete", detail=texts[0]) if texts else None


def _incomplete(group: GroupState, now: datetime) -> str:
    """Who of a group waits for a place, and why, where others have had theirs for too long."""
    if not 0 < group.placed < group.size or seconds_since(group.created, now) < INCOMPLETE_SECONDS:
        return ""
    waiting = [state for state in group.states if not state.scheduled]
    if not waiting:
        missing = group.size - len(group.states)
        return f"group {group.index}: {missing} of {group.size} pods could not be created"
    first = waiting[0]
    why = first.failure.detail if first.failure is not None else "it has no node"
    placed = f"{group.placed} of {group.size} pods have a node"
    return f"group {group.index}: {placed}, pod {first.name} has none: {why}"


def summary(groups: Sequence[GroupState]) -> list[dict[str, Any]]:
    """status.groups."""
    return [_entry(group) for group in groups[:MAX_GROUPS]]


def _entry(group: GroupState) -> dict[str, Any]:
    ended = max(
        (state.ended for state in group.states if state.ended is not None),
        key=lambda one: one.time,
        default=None,
    )
    last = {"reason": ended.reason, "pod": ended.pod, "time": ended.time} if ended is not None else None
    return {
        "index": group.index,
        "pods": group.size,
        "readyPods": group.ready,
        "phase": group.phase,
        "leader": group.leader,
        "revision": group.revision,
        **({"slowestRank": group.slowest_rank} if group.slowest_rank is not None else {}),
        **({"recreations": list(group.recreations)} if group.recreations else {}),
        **({"startDelaySeconds": group.start_delay} if group.start_delay else {}),
        **({"lastFailure": last} if last is not None else {}),
    }
