"""The states of LoRA adapters for /statusz: what ``quire-server fetch-adapters`` has left beside them, and
what the engine has of them. Stdlib only.

The files are read on a thread of their own, because probes must not wait for slow storage, and as untrusted
input: a file that is no state is left out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from quire_server.health.engine_report import UNLOADED
from quire_server.model_dir.adapter_layout import STATE_FOLDER

LOOK_SECONDS = 1.0
_MAX_FILES = 512
_MAX_BYTES = 16 << 10
_WHY_UNLOADED = (
    "It was unloaded by /v1/unload_lora_adapter. It is loaded again by /v1/load_lora_adapter, when its files "
    "change, or when the pod restarts."
)
_STATES = ("Fetching", "Fetched", "Failed")
_TEXTS = ("name", "state", "reason", "message", "revision")
_NUMBERS = ("bytes", "total_bytes")

Document = Mapping[str, object]


class FetchedAdapters:
    """Follows a directory of adapters. ``reserved``: the names of the model itself, which no adapter gets."""

    def __init__(self, folder: Path, reserved: Callable[[], Collection[str]]) -> None:
        self._folder, self._reserved = folder / STATE_FOLDER, reserved
        self._states: Sequence[Document] = ()
        self._names: Collection[str] = ()

    def follow(self) -> None:
        """Read the states again and again, on a thread."""
        threading.Thread(target=self._run, name="fetched adapters", daemon=True).start()

    def merged(self, loaded: Sequence[Document]) -> list[Document]:
        """``loaded``: the engine's. All adapters, in the order of their names."""
        return merged(loaded, self._states, self._names)

    def _run(self) -> None:
        self._names = self._reserved()
        while True:
            self._states = read(self._folder)
            time.sleep(LOOK_SECONDS)  # between two looks at files that another container writes


def read(folder: Path) -> list[Document]:
    """The states in a folder; none where there is no such folder."""
    found = []
    try:
        files = sorted(name for name in os.listdir(folder) if name.endswith(".json"))[:_MAX_FILES]
    except OSError:
        return []
    for name in files:
        try:
            with (folder / name).open("rb") as file:
                document = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            continue  # removed meanwhile, or not written by fetch-adapters
        if _is_state(document):
            found.append(document)
    return found


def merged(
    loaded: Sequence[Document], fetched: Sequence[Document], reserved: Collection[str] = ()
) -> list[Document]:
    """By name, one entry of what is loaded, fetched or both. What was unloaded is Unloaded as long as its
    files are there: an adapter that left the list, or a folder without a list, is not named any more.
    """
    source = {str(one["name"]): one for one in fetched}
    there = {name for name, one in source.items() if one["state"] == "Fetched"}
    engine = {str(one["name"]): one for one in loaded if one["state"] != UNLOADED or one["name"] in there}
    return [_entry(name, engine.get(name), source.get(name), reserved) for name in sorted(engine | source)]


def _entry(
    name: str, loaded: Document | None, fetched: Document | None, reserved: Collection[str]
) -> Document:
    """What requests may name is Ready, also while another content of it is fetched or could not be."""
    revision = fetched["revision"] if fetched is not None else ""
    is_there = fetched is None or fetched["state"] == "Fetched"
    if loaded is not None and (is_there or loaded["state"] != "Failed"):
        reason = loaded["reason"]
        if loaded["state"] == UNLOADED:
            reason = _WHY_UNLOADED
        if fetched is not None and fetched["state"] == "Failed":
            reason = fetched["message"]
        return {**loaded, "reason": reason, "total_bytes": loaded["bytes"], "revision": revision}
    assert fetched is not None
    state, reason = "Loading" if is_there else fetched["state"], fetched["message"]
    if name in reserved:
        state, reason = "Failed", "It is called as the model itself is. Choose another name."
    numbers = {key: fetched[key] for key in _NUMBERS}
    empty = {"digest": "", "rank": 0}
    return {"name": name, "state": state, "reason": reason, **empty, **numbers, "revision": revision}


def _is_state(document: object) -> bool:
    return (
        isinstance(document, dict)
        and all(isinstance(document.get(key), str) for key in _TEXTS)
        and all(type(document.get(key)) is int and document[key] >= 0 for key in _NUMBERS)
        and document["state"] in _STATES
    )
