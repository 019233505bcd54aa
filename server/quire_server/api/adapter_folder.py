"""Keeps the LoRA adapters of an engine as --adapters-dir has them: each directory in it that holds an adapter
is one, under the directory's name. What is added, changed or removed counts within seconds, in every server
that has the same volume, and after a restart.

An adapter is read once its files have not changed between two looks, for they may still be copied. One that
was unloaded over HTTP, or could not be read, is left alone until its files change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from quire_server.api.protocol.names import is_adapter_name
from quire_server.engine.messages import AdapterState
from quire_server.errors import QuireServerError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_FILES = ("adapter_config.json", "adapter_model.safetensors")

#: Size and time of change of each file.
_Signature = tuple[tuple[int, int], ...]


class Engine(Protocol):
    """The part of the engine's client that is needed here."""

    @property
    def connected(self) -> bool: ...

    async def load_adapter(self, name: str, path: Path) -> AdapterState: ...

    async def drop_adapter(self, name: str) -> None: ...


class AdapterFolder:
    """``reserved``: the names of the model itself, which no adapter gets."""

    def __init__(self, folder: Path, engine: Engine, reserved: Collection[str]) -> None:
        self._folder, self._engine, self._reserved = folder, engine, reserved
        self._seen: Mapping[str, _Signature] = {}  # at the last look
        self._loaded: dict[str, _Signature] = {}  # what was given to the engine, read or not

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                if self._engine.connected:
                    await self.look()
            except QuireServerError as error:  # the engine ended: it has no adapters when it is back
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
            if signature == self._seen.get(name) and signature != self._loaded.get(name):
                self._loaded[name] = signature
                await self._engine.load_adapter(name, self._folder / name)
        self._seen = found

    def _find(self) -> dict[str, _Signature] | None:
        """The adapters in the folder; None where it cannot be read, and what is loaded stays."""
        found = {}
        try:
            for directory in sorted(self._folder.iterdir()):
                files = [directory / name for name in _FILES]
                if files[0].exists() and is_adapter_name(directory.name, self._reserved):
                    stats = [file.stat() for file in files if file.exists()]
                    found[directory.name] = tuple((one.st_size, one.st_mtime_ns) for one in stats)
        except OSError:
            logger.warning("cannot read the folder of adapters", exc_info=True)
            return None
        return found
