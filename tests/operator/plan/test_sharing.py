"""Models that share an accelerator run in turns: never two, none for ever, and none for nothing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.operator import pods as kubelet
from quire_operator import resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import PlanInput, make_plan, sharing
from quire_operator.plan.sharing import FailedTurns, Member, Turn, schedule
from quire_operator.reports import Sample
from quire_operator.settings import Settings
from tests.operator.status.objects import deployment, model_body, pod, replica_set

NOW = 1_000_000.0
STAY, LOAD, DRAIN, START = 60.0, 20.0, 15.0, 100.0
TICK = 1.0


def holder(**fields: Any) -> Member:
    """A member that has run for a minute less than its stay, and has requests."""
    known: dict[str, Any] = {
        "is_wanted": True,
        "has_pod": True,
        "ready_since": NOW - 10,
        "stay_seconds": STAY,
    }
    return Member(name="a", **known | fields)


def asked(name: str, ago: float, **fields: Any) -> Member:
    return Member(name=name, waiting_since=NOW - ago, **fields)


TURN = Turn(member="a", since=NOW - 40, started_at=NOW - 35, ready_at=NOW - 10)


def test_the_first_keeps_the_accelerator_until_another_one_is_waited_for() -> None:
    quiet = holder(busy_until=NOW - 3600)
    kept = schedule([quiet, Member(name="b"), Member(name="c")], TURN, NOW)
    assert (kept.awake, kept.to_change(), kept.due_in) == ("a", frozenset(), None)
    assert schedule([quiet, Member(name="b"), asked("c", 1)], TURN, NOW).awake == "c"


def test_one_with_requests_has_its_minimum_stay_and_no_more() -> None:
    members = [holder(), asked("b", 30)]
    within = schedule(members, TURN, NOW)
    assert (within.awake, within.due_in) == ("a", STAY - 10)
    assert within.turn_times == {"b": TURN.ready_at + STAY if TURN.ready_at else None}
    later = schedule(members, within.turn, NOW + STAY - 10)
    assert later.awake == "b"
    assert later.to_change() == {"a"}, "b starts when the pods of a are gone"


def test_one_without_requests_makes_room_at_once_and_its_pause_is_waited_for() -> None:
    assert schedule([holder(busy_until=NOW), asked("b", 1)], TURN, NOW).awake == "b"
    pause = schedule([holder(busy_until=NOW + 7), asked("b", 1)], TURN, NOW)
    assert (pause.awake, pause.due_in) == ("a", 7)


def test_of_those_that_wait_the_longest_is_next_and_what_waited_before_its_turn_waits_anew() -> None:
    over = replace(TURN, ready_at=NOW - STAY)
    assert schedule([holder(), asked("b", 5), asked("c", 9)], over, NOW).awake == "c"
    c_had_it = replace(over, ended={"c": NOW - 1})
    assert schedule([holder(), asked("b", 5), asked("c", 9)], c_had_it, NOW).awake == "b"


@pytest.mark.parametrize(
    "left", [{"is_wanted": True}, {"has_pod": True}, {"is_wanted": True, "has_pod": True}]
)
def test_no_pod_starts_before_those_of_the_others_are_gone(left: dict[str, bool]) -> None:
    turn = Turn(member="b", since=NOW)
    ending = Member(name="a", **{"has_pod": True, **left})
    waits = schedule([ending, asked("b", 30)], turn, NOW)
    assert not waits.is_awake("b") and waits.awake == "b"
    gone = schedule([Member(name="a"), asked("b", 30)], turn, NOW)
    assert gone.is_awake("b") and gone.to_change() == {"b"}


def test_pods_that_belong_to_none_any_more_are_waited_for_too() -> None:
    turn = Turn(member="b", since=NOW)
    assert not schedule([asked("b", 30)], turn, NOW, has_others=True).is_awake("b")


def test_its_own_pod_that_still_ends_is_waited_for() -> None:
    turn = Turn(member="b", since=NOW)
    assert not schedule([asked("b", 30, has_pod=True)], turn, NOW).is_awake("b")


def test_one_that_does_not_become_ready_in_its_time_makes_room_and_its_time_begins_with_its_pod() -> None:
    loads = Member(name="a", is_wanted=True, has_pod=True, start_seconds=100)
    begun = Turn(member="a", since=NOW - 500, started_at=NOW - 99, is_swap=True)
    assert schedule([loads, asked("b", 400)], begun, NOW).due_in == 1
    assert schedule([loads, asked("b", 400)], begun, NOW + 1).awake == "b"
    awaits = replace(loads, is_wanted=False, has_pod=False)
    assert schedule([awaits, asked("b", 400)], replace(begun, started_at=None), NOW).awake == "a"


def test_one_that_cannot_start_though_the_accelerator_is_free_makes_room_in_its_time() -> None:
    stuck = asked("b", 60, start_seconds=100)
    decided = schedule([Member(name="a"), stuck], Turn(member="b", since=NOW, is_swap=True), NOW)
    assert decided.is_awake("b")
    later = [asked("a", 1), replace(stuck, waiting_since=NOW)]
    assert schedule(later, decided.turn, NOW + 99).awake == "b"
    assert schedule(later, decided.turn, NOW + 100).awake == "a"


def test_one_that_is_not_waited_for_any_more_while_the_pods_before_it_end_makes_room() -> None:
    turn = Turn(member="b", since=NOW - 50, is_swap=True)
    ending = Member(name="a", has_pod=True)
    assert schedule([ending, asked("b", 60), asked("c", 9)], turn, NOW).awake == "b"
    assert schedule([ending, Member(name="b"), asked("c", 9)], turn, NOW).awake == "c"


def test_one_that_loads_because_there_was_no_other_makes_room_for_one_that_is_waited_for() -> None:
    loads = Member(name="a", created="0", is_wanted=True, has_pod=True)
    first = schedule([loads, Member(name="b", created="1")], None, NOW).turn
    assert schedule([loads, asked("b", 1)], first, NOW).awake == "b"
    assert schedule([replace(loads, waiting_since=NOW), asked("b", 1)], first, NOW).awake == "a"


def test_a_turn_remembers_no_member_that_is_gone_and_no_time_to_come() -> None:
    before = replace(TURN, ended={"gone": NOW - 5, "b": NOW + 500})
    turn = schedule([holder(), Member(name="b")], before, NOW).turn
    assert turn is not None and turn.ended == {"b": NOW}


def test_a_suspended_one_has_no_turn_and_gives_the_accelerator_back() -> None:
    stops = holder(may_run=False)
    found = schedule([stops, Member(name="b", created="1"), Member(name="c", created="2")], TURN, NOW)
    assert found.awake == "b" and found.to_change() == {"a"}
    assert schedule([holder(may_run=False)], TURN, NOW).turn is None


def test_after_a_restart_the_turn_is_that_of_the_one_that_runs() -> None:
    runs = Member(name="b", is_wanted=True, has_pod=True, started_at=NOW - 90, ready_since=NOW - 20)
    found = schedule([Member(name="a", created="0"), runs, asked("c", 5)], None, NOW)
    assert (found.awake, found.due_in) == ("b", STAY - 20)
    assert found.turn is not None and found.turn.swap_seconds is None, "how long it took is not known"


def test_where_several_run_one_is_chosen_and_the_others_stop() -> None:
    ready = holder(created="2")
    loads = Member(name="b", created="1", is_wanted=True, has_pod=True)
    found = schedule([ready, loads], None, NOW)
    assert found.awake == "a" and found.is_awake("a") and found.to_change() == {"b"}


def test_a_new_pool_belongs_to_the_one_that_is_waited_for_else_to_the_oldest() -> None:
    pool = [Member(name="a", created="2"), Member(name="b", created="1"), Member(name="c", created="3")]
    assert schedule(pool, None, NOW).awake == "b"
    assert schedule([*pool, asked("d", 3)], None, NOW).awake == "d"


def test_a_swap_takes_from_the_decision_until_the_pod_is_ready() -> None:
    turn = Turn(member="b", since=NOW - 33, started_at=NOW - 20, is_swap=True)
    loads = Member(name="b", is_wanted=True, has_pod=True)
    assert schedule([loads], turn, NOW).swap_seconds is None
    ready = schedule([replace(loads, ready_since=NOW - 1)], turn, NOW)
    assert ready.swap_seconds == 33
    assert schedule([replace(loads, ready_since=NOW - 1)], ready.turn, NOW + 1).swap_seconds is None, "once"


def failing(name: str, **fields: Any) -> Member:
    """A member that is asked for and whose pod does not become ready."""
    known: dict[str, Any] = {"waiting_since": NOW - 500, "start_seconds": START, "generation": 1}
    return Member(name=name, **known | fields)


def after_failures(number: int, *others: Member) -> Turn:
    """The turn that follows on the last of so many failed ones of `a` in a row, at `NOW`."""
    known = FailedTurns(number=number - 1, at=NOW - 9000, generation=1)
    loads = failing("a", is_wanted=True, has_pod=True)
    over = Turn(member="a", since=NOW - START, started_at=NOW - START, is_swap=True)
    before = over if number == 1 else replace(over, failed={"a": known})
    turn = schedule([loads, *others], before, NOW).turn
    assert turn is not None and turn.member != "a" and turn.failed["a"].number == number
    return turn


@pytest.mark.parametrize(("number", "times"), [(1, 1), (2, 2), (3, 4), (4, 4), (999, 4)])
def test_after_failed_turns_one_is_put_behind_for_longer_and_longer_and_says_until_when(
    number: int, times: int
) -> None:
    b = asked("b", 5)
    turn = replace(after_failures(number, b), started_at=NOW, ready_at=NOW)
    b = replace(b, waiting_since=None, is_wanted=True, has_pod=True, ready_since=NOW, stay_seconds=10)
    until = NOW + times * START
    waits = schedule([failing("a"), b], turn, until - 1)
    assert waits.awake == "b", "though its stay is over"
    assert (waits.waiting, waits.behind, waits.due_in) == (("a",), {"a": until}, 1)
    assert waits.turn_times == {"a": until}
    assert schedule([failing("a"), b], turn, until).awake == "a"


def test_one_that_has_failed_comes_behind_those_that_wait_for_less_long() -> None:
    turn = replace(after_failures(1, asked("b", 5)), started_at=NOW, ready_at=NOW)
    b = Member(name="b", is_wanted=True, has_pod=True, ready_since=NOW, stay_seconds=10)
    found = schedule([failing("a"), b, asked("c", 0)], turn, NOW + 9)
    assert (found.waiting, found.due_in) == (("c", "a"), 1)
    assert schedule([failing("a"), b, asked("c", 0)], turn, NOW + 10).awake == "c"


def test_what_fails_keeps_the_accelerator_while_no_other_is_waited_for() -> None:
    loads = failing("a", is_wanted=True, has_pod=True)
    turn = Turn(member="a", since=NOW - 9 * START, started_at=NOW - 9 * START, is_swap=True)
    kept = schedule([loads, Member(name="b")], turn, NOW)
    assert kept.awake == "a" and kept.turn is not None and kept.turn.failed == {}


@pytest.mark.parametrize("forgets", ["a changed spec", "a ready pod"])
def test_failures_are_forgotten_with(forgets: str) -> None:
    b = asked("b", 5)
    turn = replace(after_failures(2, b), started_at=NOW, ready_at=NOW)
    if forgets == "a changed spec":
        found = schedule([failing("a", generation=2), b], turn, NOW + STAY)
        assert found.awake == "a" and found.behind == {}
        return
    has_it = replace(turn, member="a", ready_at=None)
    ready = failing("a", is_wanted=True, has_pod=True, ready_since=NOW, waiting_since=None)
    assert (found := schedule([ready, b], has_it, NOW + 1).turn) is not None and found.failed == {}


def test_a_turn_that_is_given_up_because_its_clients_have_gone_has_not_failed() -> None:
    gone = failing("a", waiting_since=None)
    ends = asked("b", 5, has_pod=True)
    turn = schedule([gone, ends], Turn(member="a", since=NOW - 2 * START, is_swap=True), NOW).turn
    assert turn is not None and turn.member == "b" and turn.failed == {}


def test_failures_are_of_no_time_to_come() -> None:
    before = replace(TURN, failed={"b": FailedTurns(number=3, at=NOW + 5000, generation=0)})
    found = schedule([holder(), asked("b", 5, start_seconds=100)], before, NOW)
    assert found.behind == {"b": NOW + 400}


def test_a_free_accelerator_goes_to_one_that_has_not_failed() -> None:
    turn = replace(TURN, failed={"b": FailedTurns(number=1, at=NOW, generation=0)})
    pool = [asked("b", 50), asked("c", 5)]
    assert schedule(pool, turn, NOW).awake == "c"
    assert schedule(pool[:1], turn, NOW).awake == "b", "there is no other"


@dataclass
class Simulated:
    """One deployment and its clients. `asks`: for each second whether a client begins to ask. `fails`: which
    of its pods never become ready, the later ones do.
    """

    name: str
    asks: list[bool]
    load: float
    drain: float
    fails: list[bool] = field(default_factory=list)
    start: float = 1800.0
    wanted: bool = False
    loading: float | None = None  # until when
    draining: float | None = None
    waiting_since: float | None = None
    quiet_since: float = 0.0

    @property
    def has_pod(self) -> bool:
        return self.wanted or self.draining is not None

    def is_ready(self, now: float) -> bool:
        return self.wanted and self.loading is not None and now >= self.loading

    def as_member(self, now: float) -> Member:
        ready = self.is_ready(now)
        return Member(
            name=self.name,
            created=self.name,
            stay_seconds=STAY,
            start_seconds=self.start,
            is_wanted=self.wanted,
            has_pod=self.has_pod,
            ready_since=self.loading if ready else None,
            busy_until=self.quiet_since + sharing.QUIET_SECONDS if ready else None,
            waiting_since=self.waiting_since,
        )


@dataclass
class World:
    """Time goes on by seconds. `waits`: how long each that waited did; `swaps`: when, and whether the one
    before had requests to its end. `turns`: those that are over.
    """

    pool: list[Simulated]
    now: float = NOW
    turn: Turn | None = None
    most_pods: int = 0
    waits: list[float] = field(default_factory=list)
    swaps: list[tuple[float, bool]] = field(default_factory=list)
    idle_swaps: int = 0
    turns: list[Turn] = field(default_factory=list)

    def step(self, second: int) -> None:
        for one in self.pool:
            if one.draining is not None and self.now >= one.draining:
                one.draining = None
            self._clients(one, second)
        before = self.turn
        found = schedule([one.as_member(self.now) for one in self.pool], before, self.now)
        self.turn = found.turn
        if before is not None and found.turn is not None and found.turn.member != before.member:
            self._swapped(before, found.turn.member)
        for one in self.pool:
            self._carry_out(one, found.is_awake(one.name))
        self.most_pods = max(self.most_pods, sum(one.has_pod for one in self.pool))
        self.now += TICK

    def _clients(self, one: Simulated, second: int) -> None:
        if one.is_ready(self.now):
            if one.waiting_since is not None:
                self.waits.append(self.now - one.waiting_since)
                one.waiting_since, one.quiet_since = None, self.now
            if one.asks[second]:
                one.quiet_since = self.now
        elif one.asks[second] and one.waiting_since is None:
            one.waiting_since = self.now

    def _swapped(self, before: Turn, to: str) -> None:
        (old,) = [one for one in self.pool if one.name == before.member]
        (new,) = [one for one in self.pool if one.name == to]
        self.idle_swaps += new.waiting_since is None
        is_busy = self.now < old.quiet_since + sharing.QUIET_SECONDS
        if before.ready_at is None and old.is_ready(self.now):
            before = replace(before, ready_at=self.now)
        self.turns.append(before)
        if before.ready_at is None:
            is_over = before.started_at is None or self.now >= before.started_at + old.start
            assert not before.is_swap or is_over, "what loads within its time keeps its turn"
            return  # none had asked for it, or none did any more, or its time was over
        self.swaps.append((self.now - before.ready_at, is_busy))

    def _carry_out(self, one: Simulated, is_awake: bool) -> None:
        if is_awake and not one.wanted:
            load = math.inf if one.fails and one.fails.pop(0) else one.load
            one.wanted, one.loading = True, self.now + load
        elif not is_awake and one.wanted:
            one.wanted, one.loading, one.draining = False, None, self.now + one.drain


SECONDS = 600
#: Each by its seed: hypothesis need not choose every number that they draw.
RANDOMS = st.integers(0, 2**32).map(Random)
TRACES = st.lists(
    st.tuples(st.sampled_from((0.0, 0.01, 0.1, 1.0)), st.floats(1, LOAD), st.floats(0, DRAIN), RANDOMS),
    min_size=1,
    max_size=5,
)


def longest_wait(members: int, load: float = LOAD) -> float:
    """The bound of docs/autoscaling.md: of each other one the stay, the load and the drain, then its own
    load; and a second for each step of the simulation. `load`: the longest.
    """
    return (members - 1) * (STAY + load + DRAIN + 3 * TICK) + DRAIN + LOAD + 3 * TICK


@settings(max_examples=25, deadline=None)
@given(TRACES)
def test_never_two_run_none_starves_and_none_swaps_for_nothing(traces: list[Any]) -> None:
    pool = [
        Simulated(f"m{index}", [random.random() < share for _ in range(SECONDS)], load, drain)
        for index, (share, load, drain, random) in enumerate(traces)
    ]
    world = World(pool)
    for second in range(SECONDS):
        world.step(second)
        late = [one for one in pool if one.waiting_since is not None]
        assert all(world.now - (one.waiting_since or 0) <= longest_wait(len(pool)) for one in late)
    assert world.most_pods <= 1
    assert world.idle_swaps == 0
    assert all(after >= STAY for after, is_busy in world.swaps if is_busy), "one with requests has its stay"
    busy_turns = sum(is_busy for _, is_busy in world.swaps)
    assert busy_turns <= SECONDS / STAY + 1, "swaps of busy models are bounded by the stay"


FAILING_SECONDS = 1500
FAILING = st.lists(st.tuples(st.lists(st.booleans(), max_size=6), RANDOMS), min_size=2, max_size=4)


@settings(max_examples=25, deadline=None)
@given(FAILING)
def test_what_fails_comes_back_in_its_time_and_holds_up_the_others_for_no_longer(traces: list[Any]) -> None:
    """All are asked all the time, so each turn of one whose pod does not become ready takes from others."""
    pool = [
        Simulated(f"m{index}", [True] * FAILING_SECONDS, 1 + random.random() * 9, 1, fails, START)
        for index, (fails, random) in enumerate(traces)
    ]
    wait = longest_wait(len(pool), START)
    world, failures = World(pool), Counter[str]()
    comes: dict[str, tuple[float, float]] = {}  # not before, and at the latest
    for second in range(FAILING_SECONDS):
        over = len(world.turns)
        world.step(second)
        for turn in world.turns[over:]:
            failures[turn.member] = 0 if turn.ready_at else failures[turn.member] + 1
            earliest = world.now + START * min(2 ** (failures[turn.member] - 1), 4) - TICK
            comes[turn.member] = (0.0, math.inf) if turn.ready_at else (earliest, earliest + wait)
        assert world.turn is not None
        has_it = world.turn.member
        assert world.turn.since >= comes.get(has_it, (0.0, 0.0))[0], "not before its time"
        assert all(world.now <= latest for name, (_, latest) in comes.items() if name != has_it)
        late = [one for one in pool if one.waiting_since and not failures[one.name] and one.name != has_it]
        assert all(world.now - (one.waiting_since or 0) <= wait for one in late)
    assert world.most_pods <= 1


def test_one_that_never_becomes_ready_has_a_fifth_of_the_time_at_most() -> None:
    always = [True] * 3600
    never, serves = Simulated("a", always, 1, 1, [True] * 99, START), Simulated("b", always, 1, 1)
    world = World([never, serves])
    ready = 0
    for second in range(3600):
        world.step(second)
        ready += serves.is_ready(world.now)
    assert ready >= 3600 * 0.8 - 3 * START


def test_two_that_are_always_asked_have_the_accelerator_for_as_long_as_each_other() -> None:
    always = [True] * 3600
    world = World([Simulated(name, always, LOAD, DRAIN) for name in ("a", "b")])
    served: Counter[str] = Counter()
    for second in range(3600):
        world.step(second)
        served.update(one.name for one in world.pool if one.is_ready(world.now))
    assert world.most_pods == 1
    assert max(served.values()) - min(served.values()) <= STAY + LOAD + DRAIN + 3
    assert len(world.swaps) <= 3600 / STAY, "an hour has as many swaps as stays at most"


SHARED = {"pool": "card", "minimumStaySeconds": 90}


def observed(replicas: int = 1, *pods: Any, demanded_ago: float | None = None, **samples: Sample) -> Observed:
    live = deployment(replicas=len(pods))
    live["spec"]["replicas"] = replicas
    return Observed(
        body=model_body(sharing=SHARED),
        children={Ref("Deployment", "m"): live},
        pods=pods,
        samples={f"uid-{name.replace('_', '-')}": sample for name, sample in samples.items()},
        demanded_at=0.0 if demanded_ago is None else NOW - demanded_ago,
    )


def member(of: Observed, waiting_since: float = 0.0) -> Member:
    return sharing.member(spec.parse(of.body), of, waiting_since, datetime.fromtimestamp(NOW, UTC))


def sample(quiet_for: float | None, asked_ago: float = 1) -> Sample:
    quiet = None if quiet_for is None else NOW - quiet_for
    return Sample(phase="serving", requests=0, quiet_since=quiet, asked_at=NOW - asked_ago)


def test_its_requests_are_known_from_its_pod_and_from_the_gateways() -> None:
    ready = pod(kubelet.ready(), name="m-0")
    assert member(observed(1, ready, m_0=sample(14))).busy_until == NOW - 14 + sharing.QUIET_SECONDS
    assert member(observed(1, ready, m_0=sample(4))).busy_until is None, "others may have come since the look"
    assert member(observed(1, ready, m_0=sample(None))).busy_until is None, "it has some"
    assert member(observed(1, ready, m_0=sample(4, asked_ago=40))).busy_until is None, "an old answer"
    assert member(observed(1, pod(kubelet.loading(), name="m-0"), m_0=sample(40))).busy_until is None
    held = member(observed(1, ready, demanded_ago=2, m_0=sample(40)))
    assert held.busy_until == NOW + 28


def test_it_waits_while_a_gateway_asks_and_not_longer() -> None:
    assert member(observed(0, demanded_ago=2), NOW - 50).waiting_since == NOW - 50
    assert member(observed(0, demanded_ago=31), NOW - 50).waiting_since is None
    assert member(observed(0), NOW - 50).waiting_since is None


def test_it_has_a_pod_while_one_ends_and_while_a_controller_may_still_make_one() -> None:
    ending = pod(kubelet.ready(), name="m-0")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert member(observed(0, ending)).has_pod
    assert not member(observed(0)).has_pod
    unseen = observed(0)
    unseen.children[Ref("Deployment", "m")]["metadata"]["generation"] = 5  # type: ignore[index] # a plain dict
    assert member(unseen).has_pod
    made = replica_set("r1", 1)
    made["spec"] = {**made.get("spec", {}), "replicas": 1}
    assert member(replace(observed(0), replica_sets=(made,))).has_pod
    evicted = pod({"phase": "Failed", "reason": "Evicted"}, name="m-1")
    assert not member(replace(observed(0), pods=(evicted,))).has_pod


def test_a_pod_of_a_lost_node_is_not_waited_for_for_ever() -> None:
    ending = pod(kubelet.ready(), name="m-0")

    def ends(ago: float) -> Member:
        until = datetime.fromtimestamp(NOW - ago, UTC)
        ending["metadata"]["deletionTimestamp"] = until.strftime("%Y-%m-%dT%H:%M:%SZ")
        return member(replace(observed(0), pods=(ending,)))

    assert ends(-30).has_pod and ends(59).has_pod
    assert not ends(61).has_pod


def test_one_that_cannot_be_applied_keeps_its_turn_while_it_runs_and_gets_no_other() -> None:
    def refused(model: Any, replicas: int) -> bool:
        now = datetime.fromtimestamp(NOW, UTC)
        return sharing.member(model, observed(replicas), 0.0, now, is_refused=True).may_run

    model = spec.parse(model_body(sharing=SHARED))
    assert (refused(model, 1), refused(model, 0)) == (True, False)
    assert (refused(None, 1), refused(None, 0)) == (True, False)


@pytest.mark.parametrize(
    ("is_awake", "live", "number"), [(True, 0, 1), (False, 1, 0), (None, 0, 0), (None, 1, 1)]
)
def test_a_deployment_runs_one_pod_in_its_turn_and_none_out_of_it(
    is_awake: bool | None, live: int, number: int
) -> None:
    model = spec.parse(model_body(sharing=SHARED))
    result = make_plan(
        PlanInput(
            model=model,
            desired=resources.build(model, Settings(engine_image="engine:1")),
            observed=observed(live),
            now=datetime.fromtimestamp(NOW, UTC),
            is_awake=is_awake,
        )
    )
    (wanted,) = [one for one in result.desired if one["kind"] == "Deployment"]
    assert wanted["spec"]["replicas"] == number
    assert wanted["spec"]["strategy"] == {"type": "Recreate"}
    assert wanted["spec"]["template"]["metadata"]["labels"]["serving.quire.dev/pool"] == "card"
