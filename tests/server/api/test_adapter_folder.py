"""What the folder of adapters has the engine do, look by look."""

import asyncio
import os
from pathlib import Path

from quire_server.api import adapter_folder
from quire_server.api.adapter_folder import AdapterFolder
from quire_server.engine.client import EngineGoneError
from quire_server.engine.messages import AdapterState


class Engine:
    connected = True

    def __init__(self):
        self.calls, self.adapters, self.reason = [], {}, ""

    async def load_adapter(self, name, path):
        self.calls.append(("load", name))
        self.adapters[name] = AdapterState(name, not self.reason, False, "1", self.reason, "", 0, 0)
        return self.adapters[name]

    async def drop_adapter(self, name):
        self.calls.append(("drop", name))


def write(directory, text="{}"):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(text)


def test_files_that_still_change_are_not_read_and_names_of_the_model_never(tmp_path):
    engine = Engine()
    folder = AdapterFolder(tmp_path, engine, ("tiny",))
    for name in ("a", "tiny", "-x"):
        write(tmp_path / name)
    (tmp_path / "empty").mkdir()
    asyncio.run(folder.look())
    write(tmp_path / "a", "{} ")
    asyncio.run(folder.look())
    assert engine.calls == []
    for _ in range(3):
        asyncio.run(folder.look())
    assert engine.calls == [("load", "a")]


def test_other_content_of_the_same_size_and_time_is_read(tmp_path):
    engine, home = Engine(), tmp_path / "adapters"
    folder = AdapterFolder(home, engine, ())
    home.mkdir()
    for version in ("1", "2"):
        write(tmp_path / version, version)
        os.utime(tmp_path / version / "adapter_config.json", ns=(0, 0))
        (home / "new").symlink_to(tmp_path / version)
        (home / "new").rename(home / "a")
        for _ in range(3):
            asyncio.run(folder.look())
    assert engine.calls == [("load", "a"), ("load", "a")]


def test_a_folder_that_cannot_be_read_leaves_what_is_loaded(tmp_path):
    engine, home = Engine(), tmp_path / "adapters"
    folder = AdapterFolder(home, engine, ())
    home.mkdir()
    write(home / "a")
    for _ in range(2):
        asyncio.run(folder.look())
    home.rename(tmp_path / "away")
    asyncio.run(folder.look())
    assert engine.calls == [("load", "a")]
    (tmp_path / "away").rename(home)
    (home / "a" / "adapter_config.json").unlink()
    asyncio.run(folder.look())
    assert engine.calls == [("load", "a"), ("drop", "a")]


def test_a_directory_that_cannot_be_read_hurts_no_other(tmp_path, monkeypatch, caplog):
    engine, exists = Engine(), Path.exists
    folder = AdapterFolder(tmp_path, engine, ())
    for name in ("a", "b"):
        write(tmp_path / name)
    asyncio.run(folder.look())

    def denied(path, names):  # what root, as whom a test may run, is never refused
        if path.parent.name in names:
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", lambda path: denied(path, ("b", "lost+found")))
    (tmp_path / "lost+found").mkdir()
    for _ in range(2):
        asyncio.run(folder.look())
    assert ("load", "a") in engine.calls and not [call for call in engine.calls if call[0] == "drop"]
    assert {record.adapter for record in caplog.records} == {"b"}


def test_what_could_not_be_read_is_tried_again_later_unless_it_was_unloaded(tmp_path):
    engine, now = Engine(), [0.0]
    folder = AdapterFolder(tmp_path, engine, (), lambda: now[0])
    write(tmp_path / "a")
    engine.reason = "the volume is away"
    tries = []
    for now[0], unloaded in ((0.0, False), (1.0, False), (2.0, False), (70.0, False), (140.0, True)):
        if unloaded:
            engine.adapters.clear()
        asyncio.run(folder.look())
        tries.append(len(engine.calls))
    assert tries == [0, 1, 1, 2, 2]


async def test_the_folder_is_followed_again_after_the_engine_has_ended(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(adapter_folder, "LOOK_SECONDS", 0.001)
    loaded = asyncio.Event()

    class Ending(Engine):
        async def load_adapter(self, name, path):
            await super().load_adapter(name, path)
            if len(self.calls) == 1:
                raise EngineGoneError("the engine ended while it loaded the adapter")
            loaded.set()
            return self.adapters[name]

        @property
        def connected(self):
            self.num_asked += 1
            return self.num_asked != 10  # it has ended once more, between two looks

        num_asked = 0

    engine = Ending()
    write(tmp_path / "a")
    following = asyncio.create_task(AdapterFolder(tmp_path, engine, ()).run())
    async with asyncio.timeout(60):
        await loaded.wait()
        loaded.clear()
        await loaded.wait()
    following.cancel()
    assert engine.calls == [("load", "a")] * 3
    assert caplog.text.count("not followed now") == 1
