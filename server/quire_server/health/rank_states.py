"""The ranks of one model as their beats and steps show them: who runs, and who has to be given up.

For /statusz, and for the supervisor, which ends a server one of whose ranks is stopped: the ranks themselves
notice that only while one of them waits for the stopped one. Pure functions: knows no clock, file or process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_server.health.heartbeat import Beats, Process

#: A rank without a beat for so long is lost: five beats, and with the time to end streams less than the five
#: seconds after which a stopped rank has to be gone.
SILENCE_SECONDS = 2.5


@dataclass(frozen=True)
class RankState:
    """``last_step``: the last that rank 0 has sent, or that another rank has executed. ``missing``: why the
    rank does not take part, "" where it does.
    """

    rank: int
    beat_age: float | None
    last_step: int
    missing: str = ""

    def document(self) -> Mapping[str, object]:
        """The entry of /statusz."""
        age = None if self.beat_age is None else round(max(0.0, self.beat_age), 3)
        return {"rank": self.rank, "beatAge": age, "lastStep": self.last_step, "missing": self.missing}


def rank_states(
    beats: Beats,
    steps: Mapping[int, int],
    now: float,
    ranks: range,
    *,
    lost_rank: int = 0,
    killed: str = "",
) -> tuple[RankState, ...]:
    """The state of each rank of this node, and of one elsewhere that is lost; none where one process has the
    whole model. ``lost_rank``: the first that did not echo a step, 0 for none. ``killed``: the process that
    was ended by SIGKILL.
    """
    elsewhere = [lost_rank] if lost_rank and lost_rank not in ranks else []
    if ranks == range(1) and not elsewhere:
        return ()
    known = {lost_rank: "NotEchoed"} if lost_rank else {}
    known |= {rank: "Killed" for rank in ranks if killed == (f"rank {rank}" if rank else "engine")}
    return tuple(
        _state(rank, beats.get(rank or Process.ENGINE), steps.get(rank, 0), known.get(rank, ""), now)
        for rank in (*ranks, *elsewhere)
    )


def _state(rank: int, beat: float | None, last_step: int, known: str, now: float) -> RankState:
    if beat is None:
        return RankState(rank, None, last_step, known or "NotStarted")
    return RankState(
        rank, now - beat, last_step, known or ("Silent" if now - beat >= SILENCE_SECONDS else "")
    )
