"""Writes the engine's heartbeats to shared memory: its phase, its progress, its load.

Cheap enough to be called in every step. The health process decides what a heartbeat means.
"""

from __future__ import annotations

import time
from typing import Any

from quire_server.core.rank_step import Work
from quire_server.health.heartbeat import Heartbeat, Phase, RankEcho, SharedState

_NO_ECHO = RankEcho(0, 0.0, 0.0, 0.0, 0)


class HeartbeatWriter:
    """The only writer of the heartbeat slot, and of the ranks' echoes."""

    def __init__(self, state: SharedState, now: float) -> None:
        self._state = state
        self._echoes: dict[int, RankEcho] = {}
        self._sample = Heartbeat(
            written_at=now,
            phase=Phase.LOADING,
            work_pending=True,
            queued=0,
            running=0,
            steps=0,
            loaded_bytes=0,
            total_bytes=0,
            started_at=now,
            load_seconds=0.0,
            progress_at=now,
            proof_at=now,
            kv_utilization=0.0,
            reason="",
        )
        self._write()

    @property
    def sample(self) -> Heartbeat:
        """The last heartbeat."""
        return self._sample

    def loaded(self, loaded_bytes: int, total_bytes: int) -> None:
        """So many bytes of the weights are loaded."""
        now = time.monotonic()
        progress_at = now if loaded_bytes > self._sample.loaded_bytes else self._sample.progress_at
        self._write(loaded_bytes=loaded_bytes, total_bytes=total_bytes, progress_at=progress_at)

    def progressed(self) -> None:
        """Progress without bytes, between loading the weights and the first completion: a graph was
        captured.
        """
        self._write(progress_at=time.monotonic())

    def warming(self) -> None:
        """The weights are loaded."""
        now = time.monotonic()
        self._write(phase=Phase.WARMING, load_seconds=now - self._sample.started_at, progress_at=now)

    def serving(self) -> None:
        """The engine is ready: the first canary has run, and the API process is connected."""
        now = time.monotonic()
        self._write(phase=Phase.SERVING, work_pending=False, progress_at=now, proof_at=now, requested_at=now)

    def requested(self) -> None:
        """A client's request waits or runs: the next heartbeat says so."""
        self._sample = self._sample._replace(requested_at=time.monotonic())

    def working(self, queued: int, running: int, kv_utilization: float) -> None:
        """There is work: from now on, missing steps are a stall."""
        if not self._sample.work_pending:
            self._write(
                work_pending=True,
                progress_at=time.monotonic(),
                queued=queued,
                running=running,
                kv_utilization=kv_utilization,
            )

    def stepped(self, pending: bool, queued: int, running: int, kv_utilization: float) -> None:
        """A step is done: progress, but no proof of inference, since it may have sampled nothing but NaN."""
        self._write(
            steps=self._sample.steps + 1,
            work_pending=pending,
            progress_at=time.monotonic(),
            queued=queued,
            running=running,
            kv_utilization=kv_utilization,
        )

    def proved(self, at: float) -> None:
        """When the last request was answered, or the canary was right; an earlier time changes nothing."""
        if at > self._sample.proof_at:
            self._write(proof_at=at)

    def idle(self, queued: int, kv_utilization: float) -> None:
        """There is no work."""
        self._write(
            work_pending=False,
            progress_at=time.monotonic(),
            queued=queued,
            running=0,
            kv_utilization=kv_utilization,
        )

    def rank_stepped(self, number: int) -> None:
        """Rank 0 has sent a step to the other ranks."""
        self._state.write_step(0, number)

    def rank_echoed(self, rank: int, number: int, work: Work) -> None:
        """A rank has executed a step, of rank 0 or of another one, on whichever node."""
        last, seconds = self._echoes.get(rank, _NO_ECHO), work.micros / 1e6
        echo = RankEcho(
            number,
            time.monotonic(),
            seconds or last.step_seconds,
            last.busy_seconds + seconds,
            last.exchanged_bytes + work.exchanged,
        )
        self._echoes[rank] = echo
        self._state.write_echo(rank, echo)

    def rank_lost(self, rank: int) -> None:
        """A rank did not echo a step: the server ends."""
        self._write(lost_rank=rank)

    def set_unready_reason(self, reason: str) -> None:
        """Make the engine unready for this reason; an empty one makes it ready again."""
        if reason != self._sample.reason:
            self._write(reason=reason)

    def set_transfer_degraded(self, is_degraded: bool) -> None:
        """Whether prefixes are computed here that another server should have computed."""
        if is_degraded is not self._sample.transfer_degraded:
            self._write(transfer_degraded=is_degraded)

    def _write(self, **changes: Any) -> None:
        self._sample = self._sample._replace(written_at=time.monotonic(), **changes)
        self._state.write_heartbeat(self._sample)
