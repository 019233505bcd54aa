"""What the folder of adapters has the engine do, look by look."""

import asyncio

from quire_server.api import adapter_folder
from quire_server.api.adapter_folder import AdapterFolder
from quire_server.engine.client import EngineGoneError


class Engine:
    connected = True

    def __init__(self):
        self.calls = []

    async def load_adapter(self, name, path):
        self.calls.append(("load", name))

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


async def test_the_folder_is_followed_again_after_the_engine_has_ended(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(adapter_folder, "LOOK_SECONDS", 0.001)
    loaded = asyncio.Event()

    class Ending(Engine):
        async def load_adapter(self, name, path):
            await super().load_adapter(name, path)
            if len(self.calls) == 1:
                raise EngineGoneError("the engine ended while it loaded the adapter")
            loaded.set()

    engine = Ending()
    write(tmp_path / "a")
    following = asyncio.create_task(AdapterFolder(tmp_path, engine, ()).run())
    async with asyncio.timeout(10):
        await loaded.wait()
    following.cancel()
    assert engine.calls == [("load", "a")] * 2
    assert caplog.text.count("not followed now") == 1
