"""The ranks of one model as their beats, steps and echoes show them: where each runs, how long it takes, and
who has to be given up.

For /statusz and /metrics, and for the supervisor, which ends a server one of whose ranks is stopped: the
ranks themselves notice that only while one of them waits for the stopped one. Beats are of this node's ranks;
ranks of other nodes are judged by what rank 0 has received from them. Pure functions without clock or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire_server.core.topology import Topology
from quire_server.health.heartbeat import Beats, Process, RankEcho

#: A rank without a beat for so long is lost: five beats, and with the time to end streams less than the five
#: seconds after which a stopped rank has to be gone.
SILENCE_SECONDS = 2.5


@dataclass(frozen=True)
class Group:
    """What rank 0 has of the ranks of all nodes. ``hosts``: the machines or pods of those that have loaded
    their part. ``sent_at``: when the last step was sent.
    """

    topology: Topology = field(default_factory=Topology)
    hosts: Mapping[int, str] = field(default_factory=dict)
    echoes: Mapping[int, RankEcho] = field(default_factory=dict)
    sent_at: float = 0.0


@dataclass(frozen=True)
class RankState:
    """``beat_age``: None on another node. ``last_step``: the last that rank 0 has sent, or that another rank
    has executed. ``missing``: why the rank does not take part, "" where it does. ``step_seconds``: to compute
    its last step, without waits for other ranks. ``overdue``: seconds since it was sent a step that it
    has not acknowledged.
    """

    rank: int
    beat_age: float | None
    last_step: int
    missing: str = ""
    stage: int = 0
    tensor_rank: int = 0
    host: str = ""
    echo_age: float | None = None
    step_seconds: float | None = None
    overdue: float = 0.0

    @property
    def silence(self) -> float:
        """Seconds without the sign of life that this rank should give."""
        return max(self.beat_age or 0.0, self.overdue)

    def document(self) -> Mapping[str, object]:
        """The entry of /statusz."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "tensorRank": self.tensor_rank,
            "host": self.host,
            "beatAge": _rounded(self.beat_age),
            "lastStep": self.last_step,
            "echoAge": _rounded(self.echo_age),
            "stepSeconds": None if self.step_seconds is None else round(self.step_seconds, 6),
            "overdueSeconds": _rounded(self.overdue),
            "missing": self.missing,
        }


def rank_states(
    beats: Beats,
    steps: Mapping[int, int],
    now: float,
    ranks: range,
    *,
    lost_rank: int = 0,
    killed: str = "",
    group: Group = Group(),
) -> tuple[RankState, ...]:
    """The state of each rank of the model, or on a node without rank 0 of each rank there; none where one
    process has the whole model. ``ranks``: of this node. ``lost_rank``: the first that did not echo a step, 0
    for none. ``killed``: the process that was ended by SIGKILL.
    """
    size = group.topology.size
    if max(size, len(ranks)) == 1 and 0 in ranks:
        return ()
    known = {lost_rank: "NotEchoed"} if lost_rank else {}
    known |= {rank: "Killed" for rank in ranks if killed == (f"rank {rank}" if rank else "engine")}
    states = []
    for rank in range(max(size, len(ranks))) if 0 in ranks else ranks:
        missing = known.get(rank, "")
        if rank in ranks:
            state = _here(rank, beats.get(rank or Process.ENGINE), steps.get(rank, 0), missing, now)
        else:
            state = RankState(rank, None, 0, missing or ("" if rank in group.hosts else "NotLoaded"))
        states.append(_echoed(state, steps.get(0, 0), now, group))
    return tuple(states)


def _here(rank: int, beat: float | None, last_step: int, known: str, now: float) -> RankState:
    if beat is None:
        return RankState(rank, None, last_step, known or "NotStarted")
    return RankState(
        rank, now - beat, last_step, known or ("Silent" if now - beat >= SILENCE_SECONDS else "")
    )


def _echoed(state: RankState, sent: int, now: float, group: Group) -> RankState:
    """The state with what rank 0 has heard of the rank."""
    tensor, rank = group.topology.tensor, state.rank
    state = replace(state, stage=rank // tensor, tensor_rank=rank % tensor, host=group.hosts.get(rank, ""))
    echo = group.echoes.get(rank)
    if echo is None:
        return replace(state, overdue=max(0.0, now - group.sent_at) if sent and group.sent_at else 0.0)
    return replace(
        state,
        last_step=max(state.last_step, echo.number),
        echo_age=now - echo.at,
        step_seconds=echo.step_seconds,
        overdue=max(0.0, now - max(echo.at, group.sent_at)) if echo.number < sent else 0.0,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 3)
