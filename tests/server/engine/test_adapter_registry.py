"""Adapters by name: what a request gets while a name is loaded, loaded again, and dropped."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from quire_server.core.adapter_slots import AdapterSlots
from quire_server.engine import adapter_registry
from quire_server.engine.adapter_registry import AdapterRegistry
from quire_server.engine.messages import LoadAdapter
from quire_server.errors import ConfigError, RequestError
from quire_server.models.adapter_file import AdapterFile, NoRoomError
from quire_server.text.fair_executor import FairExecutor


class Store:
    """Reads what a test has put at a path."""

    def __init__(self):
        self.contents, self.numbers = {}, []
        self.thread = FairExecutor("adapters")

    def read(self, directory: Path) -> AdapterFile:
        content = self.contents[str(directory)]
        if isinstance(content, Exception):
            raise content
        return AdapterFile(8, {}, content)

    def begin(self, number: int, directory: Path, replaces: int) -> "Future[AdapterFile]":
        self.replaced = replaces
        return self.thread.submit("", lambda: self.read(directory))

    def exchange(self) -> bool:
        return False

    def add(self, number, file):
        self.numbers.append(number)

    def remove(self, number):
        self.numbers.remove(number)


@pytest.fixture
def store():
    return Store()


def make(store):
    slots, woken = AdapterSlots(2), threading.Event()
    registry = AdapterRegistry(store, slots)
    registry.wake = woken.set

    def load(name, content):
        store.contents[f"/{name}"] = content
        woken.clear()
        assert registry.apply([LoadAdapter(name, f"/{name}", content)], ())
        assert woken.wait(60) and registry.advance()
        return next(state for state in registry.states() if state.name == name)

    return registry, slots, load


def test_a_name_that_gets_other_content_keeps_the_old_one_for_its_requests(store):
    registry, slots, load = make(store)
    assert load("a", "one").is_ready
    first = registry.find("a")
    slots.add_user(first.number)
    assert load("a", "two").digest == "two"
    second = registry.find("a")
    assert second.number != first.number and second.key != first.key and store.numbers == [1, 2]
    slots.remove_user(first.number)
    registry.advance()
    assert store.numbers == [2]
    load("a", "two")  # the same content once more changes nothing
    assert registry.find("a") == second


def test_an_update_takes_the_room_of_the_old_content_unless_a_request_uses_that(store):
    registry, slots, load = make(store)
    load("a", "one")
    assert store.replaced == 0
    load("a", "two")
    assert store.replaced == 1
    slots.add_user(registry.find("a").number)
    state = load("a", NoRoomError("The host is full."))
    assert store.replaced == 0 and state.is_ready
    assert state.reason.startswith("The host is full. The earlier content")
    assert "earlier content" not in load("b", NoRoomError("The host is full.")).reason


def test_the_names_in_use_are_those_of_requests_also_of_a_name_that_was_dropped(store):
    registry, slots, load = make(store)
    for name in ("b", "a", "idle"):
        load(name, name)
        slots.add_user(registry.find(name).number)
    slots.acquire(registry.find("b").number)
    slots.remove_user(registry.find("idle").number)
    registry.apply((), ["b"])
    registry.advance()
    assert registry.in_use() == (("b",), ("a",))


def test_a_dropped_name_is_unloaded_until_it_is_loaded_again(store):
    registry, _, load = make(store)
    load("a", "one")
    load("b", "one")
    registry.apply((), ["a", "unknown"])
    assert registry.unloaded == ("a",)
    load("a", "one")
    assert registry.unloaded == ()


def test_what_cannot_be_read_leaves_the_earlier_content_and_has_its_reason(store):
    registry, _, load = make(store)
    load("a", "one")
    state = load("a", ConfigError("use_dora is true"))
    assert state.is_ready and state.reason == "use_dora is true" and state.digest == "one"
    assert not load("b", MemoryError()).is_ready
    assert registry.find("a") is not None
    with pytest.raises(RequestError, match="not loaded"):
        registry.find("b")


def test_an_error_that_was_not_foreseen_is_the_reason_and_in_the_log_with_its_traceback(store, caplog):
    _, _, load = make(store)
    state = load("a", OverflowError("int too large to convert to float"))
    assert not state.is_ready and not state.is_loading and "OverflowError" in state.reason
    assert "Traceback" in caplog.text and "int too large" in caplog.text
    assert load("b", "one").is_ready


def test_a_dropped_name_is_gone_at_once_and_its_memory_with_its_last_request(store):
    registry, slots, load = make(store)
    load("a", "one")
    number = registry.find("a").number
    slots.add_user(number)
    slots.acquire(number)
    assert registry.apply((), ["a", "unknown"]) and registry.states() == ()
    with pytest.raises(RequestError):
        registry.find("a")
    registry.advance()
    assert store.numbers == [number] and slots.num_resident == 1
    slots.release(number)
    slots.remove_user(number)
    registry.advance()
    assert store.numbers == [] and slots.num_resident == 0


def test_there_is_a_limit_and_a_server_without_adapters_says_so(store, monkeypatch):
    monkeypatch.setattr(adapter_registry, "MAX_ADAPTERS", 1)
    registry, _, load = make(store)
    assert not load("broken", ConfigError("use_dora is true")).is_ready
    assert load("a", "one").is_ready, "one that failed took the room of another"
    registry.apply([LoadAdapter("b", "/b", "1")], ())
    assert "drop one" in registry.states()[1].reason
    assert load("a", "two").digest == "two"
    without = AdapterRegistry(None, AdapterSlots(0))
    without.apply([LoadAdapter("a", "/a", "1")], ())
    assert "--max-adapters" in without.states()[0].reason
