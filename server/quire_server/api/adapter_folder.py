"""Keeps the LoRA adapters of an engine as --adapters-dir has them: each directory in it that holds an adapter
is one, under the directory's name. What is added, changed or removed counts within seconds, in every server
that has the same volume, and after a restart.

An adapter is read once its files have not changed between two looks, for they may still be copied. One that
could not be read is tried again a minute later, or when its files change; one that was unloaded over HTTP is
left alone until they change.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from quire_server.engine.messages import AdapterState
from quire_server.errors import QuireServerError
from quire_server.model_dir import adapter_layout
from quire_server.model_dir.adapter_layout import is_adapter_name

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
RETRY_SECONDS = 60.0
_FILES = (adapter_layout.CONFIG, adapter_layout.WEIGHTS)

#: Of each file what other content changes: its size, its device, and its times of change. A copy may keep the
#: time of its content and never has that of its inode. Inode numbers are left out: some network filesystems
#: give a file another one at each look.
_Signature = tuple[tuple[int, int, int, int], ...]


class Engine(Protocol):
    """The part of the engine's client that is needed here."""

    @property
    def connected(self) -> bool: ...

    @property
    def adapters(self) -> Mapping[str, AdapterState]: ...

    async def load_adapter(self, name: str, path: Path) -> AdapterState: ...

    async def drop_adapter(self, name: str) -> None: ...


class AdapterFolder:
    """``reserved``: the names of the model itself, which no adapter gets."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        reserved: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._engine, self._reserved, self._clock = folder, engine, reserved, clock
        self._seen: Mapping[str, _Signature] = {}  # at the last look
        self._loaded: dict[str, _Signature] = {}  # what was given to the engine, read or not
        self._retries: dict[str, float] = {}  # when to read again what could not be read

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                if self._engine.connected:
                    await self.look()
                else:
                    self._loaded.clear()  # an engine that comes back has none
            except QuireServerError as error:
                logger.warning("the adapters are not followed now", extra={"why": str(error)})
                self._loaded.clear()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Load what has been there unchanged since the last look, and drop what is gone."""
        found = await asyncio.to_thread(self._find)
        if found is None:
            return
        for name in self._loaded.keys() - found.keys():
            del self._loaded[name]
            await self._engine.drop_adapter(name)
        for name, signature in found.items():
            is_new = signature != self._loaded.get(name) or self._is_due(name)
            if is_new and signature == self._seen.get(name):
                await self._load(name)
                self._loaded[name] = signature
        self._seen = found

    async def _load(self, name: str) -> None:
        state = await self._engine.load_adapter(name, self._folder / name)
        self._retries.pop(name, None)
        if state.reason:
            self._retries[name] = self._clock() + RETRY_SECONDS

    def _is_due(self, name: str) -> bool:
        """Whether to try one again that could not be read, unless it was unloaded meanwhile."""
        return name in self._engine.adapters and self._clock() >= self._retries.get(name, math.inf)

    def _find(self) -> dict[str, _Signature] | None:
        """The adapters in the folder; None where it cannot be read, and what is loaded stays. So does an
        adapter whose own directory cannot be read.
        """
        found = {}
        try:
            names = sorted(os.listdir(self._folder))
        except OSError:
            logger.warning("cannot read the folder of adapters", exc_info=True)
            return None
        for name in names:
            if is_adapter_name(name, self._reserved) and (signature := self._signature(name)):
                found[name] = signature
        return found

    def _signature(self, name: str) -> _Signature:
        """Of a directory's files; empty where it is none of an adapter."""
        try:
            files = [self._folder / name / file for file in _FILES]
            stats = [file.stat() for file in files if file.exists()] if files[0].exists() else []
        except OSError as error:
            logger.warning("cannot read an adapter's directory", extra={"adapter": name, "why": str(error)})
            return self._seen.get(name, ())
        return tuple((one.st_size, one.st_dev, one.st_mtime_ns, one.st_ctime_ns) for one in stats)
