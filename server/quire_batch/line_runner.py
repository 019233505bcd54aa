"""Asks the gateway for one line after the other, and notes what came of them.

How many at once is decided by `concurrency`, what an answer means by `outcome`. An answer is kept until the
database has it. Lines that are in flight when this process dies are asked for again, others not.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable

from quire_batch import outcome
from quire_batch.concurrency import Concurrency, after_refusal, after_success
from quire_batch.gateway_client import GatewayClient
from quire_batch.metrics import Metrics
from quire_batch.outcome import Answer, Outcome, Verdict
from quire_batch.patience import Patience
from quire_batch.records import LineState, Running, Work
from quire_batch.settings import Settings
from quire_batch.space import RUNNING, Space
from quire_batch.store import Held, Store
from quire_batch.turns import in_turns

_STATES = {Verdict.DONE: LineState.DONE, Verdict.FAILED: LineState.FAILED}


class LineRunner:
    """The lines in flight of one worker. ``wake`` is called when one is over."""

    def __init__(
        self,
        store: Store,
        space: Space,
        gateway: GatewayClient,
        metrics: Metrics,
        settings: Settings,
        worker: str,
        patience: Patience,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._space = space
        self._gateway = gateway
        self._metrics = metrics
        self._settings = settings
        self._worker = worker
        self._patience = patience
        self._wake = wake
        self._clock = clock
        self._limits: dict[str, Concurrency] = {}  # by lane
        self._lanes: dict[str, str] = {}  # of the batches that run
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}  # by batch
        self._held: dict[str, set[tuple[int, int]]] = {}  # see `store.Held`
        self._turn = 0
        self._error: BaseException | None = None

    async def take(self) -> None:
        """Begin as many lines as there may be. Clients take turns in being first, and so do their batches.
        Raises what one of them was not meant to raise: a worker that begins anew has its lines again.
        """
        if self._error is not None:
            raise self._error
        running = await asyncio.to_thread(self._store.running)
        self._stop_others(running)
        self._turn += 1
        in_flight: Counter[str] = Counter()
        for batch_id, tasks in self._tasks.items():
            in_flight[self._lanes.get(batch_id, "")] += len(tasks)
        for one in in_turns(running, self._turn):
            limit = self._limits.setdefault(one.lane, Concurrency())
            free = self._settings.concurrency - self._total()
            room = min(limit.room(in_flight[one.lane], self._clock()), free)
            if room > 0 and not (one.is_job and one.id in self._tasks):  # a job has one line
                in_flight[one.lane] += await self._take(one.id, room)
        self._metrics.limit.set(sum(one.limit for one in self._limits.values()))

    async def end(self, seconds: float) -> None:
        """Wait so long for what is in flight, then stop it; the rest is released with the worker."""
        tasks = [task for some in self._tasks.values() for task in some]
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=seconds)
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def held(self) -> Held:
        """The lines in flight."""
        return {batch_id: list(leases) for batch_id, leases in self._held.items()}

    def _total(self) -> int:
        return sum(map(len, self._tasks.values()))

    def _stop_others(self, running: list[Running]) -> None:
        """Batches that are cancelled, or expired, have no lines in flight any more."""
        lanes = {one.id: one.lane for one in running}
        for batch_id in self._lanes.keys() - lanes.keys():
            for task in self._tasks.get(batch_id, ()):
                task.cancel()
        self._lanes = lanes
        for lane in self._limits.keys() - set(lanes.values()):
            del self._limits[lane]

    async def _take(self, batch_id: str, number: int) -> int:
        """How many there were."""
        found = await asyncio.to_thread(self._taken, batch_id, number)
        for work in found:
            task = asyncio.create_task(self._run(work))
            tasks = self._tasks.setdefault(batch_id, set())
            tasks.add(task)
            self._held.setdefault(batch_id, set()).add((work.number, work.take))
            task.add_done_callback(functools.partial(self._over, work))
            self._metrics.in_flight.inc()
        return len(found)

    def _taken(self, batch_id: str, number: int) -> list[Work]:
        """In a thread. Raises ContentsError where there is no room for answers."""
        self._space.check(RUNNING)
        now = self._clock()
        until = now + self._settings.lease_seconds
        return self._store.take_lines(batch_id, self._worker, number, now, until)

    def _over(self, work: Work, task: asyncio.Task[None]) -> None:
        self._metrics.in_flight.dec()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
        tasks = self._tasks[work.batch_id]
        tasks.discard(task)
        self._held[work.batch_id].discard((work.number, work.take))
        if not tasks:
            del self._tasks[work.batch_id], self._held[work.batch_id]
        self._wake()

    async def _run(self, work: Work) -> None:
        begun_at = self._clock()
        if work.losses >= outcome.MAX_LOSSES:
            await self._finish(work, LineState.FAILED, outcome.lost(f"{work.batch_id}-{work.number}"))
            return
        answer = await self._gateway.ask(work)
        judged = outcome.judge(answer, work.failures)
        now = self._clock()
        self._learn(work.batch_id, judged, begun_at, now)
        if judged.verdict in _STATES:
            self._metrics.seconds.observe(now - begun_at)
            await self._finish(work, _STATES[judged.verdict], answer)
            return
        self._metrics.retries.labels(judged.verdict).inc()
        is_failure = judged.verdict is Verdict.AGAIN
        not_before = now + judged.delay if is_failure else 0.0  # a refusal makes the whole batch wait
        failures = work.failures + is_failure
        await self._patience.call(self._store.put_back, work, self._worker, not_before, failures)

    async def _finish(self, work: Work, state: LineState, answer: Answer) -> None:
        result = outcome.response(answer)
        call = self._store.finish_line
        if await self._patience.call(call, work, self._worker, state, result, self._clock()):
            is_error = state is LineState.FAILED and not outcome.is_lines_own_fault(answer)
            self._metrics.lines.labels("error" if is_error else state).inc()

    def _learn(self, batch_id: str, judged: Outcome, begun_at: float, now: float) -> None:
        lane = self._lanes.get(batch_id, "")
        if (limit := self._limits.get(lane)) is None:
            return
        if judged.verdict is Verdict.REFUSED or judged.is_overload:
            self._limits[lane] = after_refusal(limit, begun_at, now, judged.delay)
        elif judged.verdict is not Verdict.AGAIN:
            self._limits[lane] = after_success(limit, self._settings.concurrency)
