"""The work of one worker: batches are validated, their lines asked for, their results written, in this order.

Several workers share the batches of PostgreSQL; each takes what no other one has. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from quire_batch import batch_files
from quire_batch.batch_files import InvalidFileError, LostBatchError, error_of
from quire_batch.contents import Contents, ContentsError
from quire_batch.line_runner import LineRunner
from quire_batch.lines import LineError
from quire_batch.metrics import Metrics
from quire_batch.patience import PASSING, Patience, brief
from quire_batch.records import Batch, Status
from quire_batch.settings import Settings
from quire_batch.space import RUNNING, Space
from quire_batch.store import Held, Store

logger = logging.getLogger(__name__)

_IDLE_SECONDS = (
    1.0  # until it is looked for work that another worker's API has taken, or that waits for a time
)
_HOUSEKEEPING_SECONDS = 5.0
_AGAIN_SECONDS = 30.0  # after which a batch that could not be prepared is tried again
_RENEWALS_PER_LEASE = 4
_PREPARED = (Status.CANCELLING, Status.FINALIZING, Status.VALIDATING)


class Processor:
    """One worker. ``wake``: set when there is something new to do."""

    def __init__(
        self,
        store: Store,
        contents: Contents,
        space: Space,
        runner: LineRunner,
        metrics: Metrics,
        settings: Settings,
        worker: str,
        patience: Patience,
        wake: asyncio.Event,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._contents = contents
        self._space = space
        self._runner = runner
        self._metrics = metrics
        self._settings = settings
        self._worker = worker
        self._patience = patience
        self._wake = wake
        self._clock = clock
        self._preparing: asyncio.Future[None] | None = None  # in a thread, which cannot be cancelled
        self._prepared = ""  # the id of the batch in it

    async def run(self) -> None:
        """Until it is cancelled: then what is in flight has a moment to end, and the rest waits again."""
        if lost := await self._patience.call(self._store.release_earlier, self._worker):
            logger.warning("lines of a process of this worker that died wait again", extra={"lines": lost})
        parts = (self._take_lines(), self._prepare(), self._keep_house())
        tasks = [asyncio.create_task(one) for one in parts]
        renewing = asyncio.create_task(self._renew())
        try:
            await asyncio.gather(*tasks, asyncio.shield(renewing))
        finally:
            for task in tasks:
                task.cancel()
            await self._runner.end(self._settings.drain_seconds)
            if self._preparing is not None:  # no other worker may write the same files beside it
                await asyncio.wait({self._preparing})
            renewing.cancel()
            await asyncio.gather(*tasks, renewing, return_exceptions=True)
            await asyncio.wait_for(asyncio.to_thread(self._store.release, self._worker), 10.0)

    async def _take_lines(self) -> None:
        while True:
            self._wake.clear()
            await self._try(self._runner.take())
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _prepare(self) -> None:
        """Validate and finalize one batch after the other."""
        while True:
            now, worker = self._clock(), self._worker
            until = now + self._settings.lease_seconds
            batch = await self._patience.call(self._store.take_batch, _PREPARED, worker, now, until)
            if batch is None:
                await asyncio.sleep(_IDLE_SECONDS / 4)  # another worker's API may have taken one
                continue
            is_new = batch.status is Status.VALIDATING
            await self._prepare_one(self._validate if is_new else self._finalize, batch)
            self._wake.set()

    async def _prepare_one(self, function: Callable[[Batch], None], batch: Batch) -> None:
        """What fails at one batch, such as a file that cannot be read now, keeps no other one waiting."""
        self._prepared = batch.id
        self._preparing = asyncio.ensure_future(asyncio.to_thread(function, batch))
        self._preparing.add_done_callback(self._is_prepared)
        try:
            await asyncio.shield(self._preparing)
        except PASSING as error:
            self._metrics.store_errors.inc()
            facts = {"batch": batch.id, "why": brief(error), "again_seconds": _AGAIN_SECONDS}
            logger.warning("batch cannot be prepared now", extra=facts)
            until = self._clock() + _AGAIN_SECONDS
            await self._patience.call(self._store.put_off, batch, self._worker, until)

    def _is_prepared(self, _: asyncio.Future[None]) -> None:
        self._prepared = ""

    def _validate(self, batch: Batch) -> None:
        parts = self._contents.read(batch.input_file_id)
        found = batch_files.requests(parts, batch.endpoint, self._settings.quotas.lines)
        guarded = self._space.guarded(RUNNING, found, lambda line: len(line.body))
        try:
            total = self._store.add_lines(batch, self._worker, guarded)
            if total is not None:
                self._store.accept(batch, self._worker, total, self._clock())
        except InvalidFileError as error:
            self._refuse(batch, error.errors)
        except ContentsError as error:
            if not error.is_missing:
                raise
            self._refuse(batch, [error_of(LineError("file_not_found", "The file was deleted."), None)])

    def _refuse(self, batch: Batch, errors: Sequence[Mapping[str, Any]]) -> None:
        if self._store.refuse(batch, self._worker, errors, self._clock()):
            self._metrics.ended.labels(Status.FAILED).inc()
            logger.info("batch is not valid", extra={"batch": batch.id, "client": batch.owner})

    def _finalize(self, batch: Batch) -> None:
        if not self._has_results(batch) and not self._write_results(batch):
            return
        if self._store.finalize(batch, self._worker, self._clock()):
            ended = self._store.batch(batch.owner, batch.id, is_job=batch.is_job)
            status = ended.status if ended is not None else Status.COMPLETED
            self._metrics.ended.labels(status).inc()
            facts = {"batch": batch.id, "client": batch.owner, "status": str(status)}
            logger.info("batch is over", extra=facts)

    @staticmethod
    def _has_results(batch: Batch) -> bool:
        """Its files are there already, or it has none: then some of its lines may be deleted."""
        return batch.is_job or not batch.total or bool(batch.output_file_id or batch.error_file_id)

    def _write_results(self, batch: Batch) -> bool:
        """False where another worker has done so."""
        store, contents, space, now = self._store, self._contents, self._space, self._clock()
        try:
            written = batch_files.write_results(batch, store, contents, space, now)
        except LostBatchError:
            logger.warning("another worker has finalized the batch", extra={"batch": batch.id})
            return False
        return store.add_results(batch, self._worker, written)

    async def _keep_house(self) -> None:
        while True:
            await self._try(asyncio.to_thread(self._tidy, self._runner.held()))
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)  # what it looks for comes with time alone

    def _tidy(self, held: Held) -> None:
        now = self._clock()
        self._store.expire(now)
        if lost := self._store.free_lost_lines(self._worker, now, held):
            logger.warning("lines of a lost worker wait again", extra={"lines": lost})
        for id_ in self._store.forget(now - self._settings.quotas.retention_seconds):
            self._contents.delete(id_)

    async def _renew(self) -> None:
        lease = self._settings.lease_seconds
        while True:
            await asyncio.sleep(lease / _RENEWALS_PER_LEASE)  # a lease is of time
            until, held = self._clock() + lease, self._runner.held()
            renew = asyncio.to_thread(self._store.renew, self._worker, until, held, self._prepared)
            await self._try(renew)

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it; what the store fails at is tried again with the next round."""
        try:
            await work
        except PASSING as error:
            self._patience.failed(error)
        else:
            self._patience.succeeded()
