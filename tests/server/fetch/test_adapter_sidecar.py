"""``quire-server fetch-adapters`` with real downloads: what a server finds there while a list changes."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path, PurePosixPath

import pytest

from quire_server.fetch.adapter_sidecar import AdapterSidecar
from tests.server.fetch.bucket_server import KEY, SECRET, publish
from tests.server.fetch.hub_server import COMMIT, HubServer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b'{"peft_type": "LORA"}', WEIGHTS: b"w" * 100_000, "README.md": b"#"}
TOKEN = "token-canary"


@pytest.fixture
def hub():
    server = HubServer(dict(FILES))
    yield server
    server.close()


@pytest.fixture
def place(tmp_path):
    """The list, the claims with two adapters and a pickle, and the directory of the adapters."""
    claims = tmp_path / "claims"
    for name in ("one", "two", "pickle"):
        directory = claims / "volume" / name
        directory.mkdir(parents=True)
        (directory / CONFIG).write_text(name)
        weights = "adapter_model.bin" if name == "pickle" else WEIGHTS
        (directory / weights).write_text(f"weights of {name}")
    place = Place(tmp_path / "adapters.json", claims, tmp_path / "adapters")
    yield place
    for followed in place.followed:
        followed.close()


class Place:
    def __init__(self, listing, claims, to):
        self.listing, self.claims, self.to = listing, claims, to
        self.followed = []

    def write(self, *entries):
        self.listing.write_text(json.dumps({"adapters": entries}))

    def from_claim(self, name, directory, **more):
        return {"name": name, "path": f"{self.claims}/volume/{directory}", **more}

    def sidecar(self, **environ):
        self.followed.append(Followed(self, {**os.environ, **environ}))
        return self.followed[-1]

    def process(self, **options):
        arguments = ("--list", self.listing, "--to", self.to, "--claims", self.claims)
        command = [sys.executable, "-m", "quire_server", "fetch-adapters", *map(str, arguments)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, **options)

    def states(self):
        """By name, each state and its message."""
        documents = [json.loads(path.read_text()) for path in (self.to / ".state").glob("*.json")]
        return {document["name"]: (document["state"], document["message"]) for document in documents}

    def state(self, name):
        return self.states().get(name, ("", ""))[0]

    def content(self, name):
        """Of the file with the configuration."""
        return (self.to / name / CONFIG).read_text() if (self.to / name).exists() else None

    def wait(self, condition, step=lambda: time.sleep(0.02)):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.states()
            step()


class Followed:
    """A sidecar in this process; its downloads are processes."""

    def __init__(self, place, environ):
        self.place = place
        self.sidecar = AdapterSidecar(place.listing, place.to, PurePosixPath(place.claims), environ)

    def step(self):
        self.sidecar.step(0.05)

    def close(self):
        """End the downloads that run."""
        for process in self.sidecar._running.values():
            process.kill()
            process._process.wait()
            process.close()
        self.sidecar._selector.close()

    def until(self, condition):
        self.place.wait(condition, self.step)
        self.step()  # what was decided by then is done


def test_a_list_is_followed_while_it_changes_and_broken_entries_hurt_no_other(place, hub, caplog):
    environment = {"HF_ENDPOINT": hub.endpoint}
    hub_entry = {"name": "hub", "source": "hf://org/tiny", "environment": environment}
    place.write(
        place.from_claim("pickle", "pickle"),
        {"name": "none", "source": "hf://org/none", "environment": environment},
        {"name": "../out", "source": "hf://org/tiny"},
        {"name": "bad", "source": "ftp://x"},
        place.from_claim("one", "one"),
        hub_entry,
    )
    followed = place.sidecar()
    failed = dict.fromkeys(("pickle", "none", "bad", "adapters[2]"), "Failed")
    ends = {"one": "Fetched", "hub": "Fetched", **failed}
    followed.until(lambda: {name: state for name, (state, _) in place.states().items()} == ends)
    states = place.states()
    assert "A pickle can run code" in states["pickle"][1]
    assert "Check the name" in states["none"][1]
    assert "names no model" in states["bad"][1] and "name must have" in states["adapters[2]"][1]
    assert sorted(path.name for path in (place.to / "hub").iterdir()) == [
        CONFIG,
        WEIGHTS,
        "quire-manifest.json",
    ]
    state = json.loads((place.to / ".state" / "hub.json").read_text())
    size = len(FILES[CONFIG]) + len(FILES[WEIGHTS])
    assert state | {"revision": COMMIT, "bytes": size, "total_bytes": size} == state
    assert not (place.to.parent / "out").exists()

    place.write(hub_entry, place.from_claim("one", "two"))
    followed.until(lambda: place.content("one") == "two" and place.state("pickle") == "")
    followed.step()
    assert place.states().keys() == {"hub", "one"}
    assert {path.name for path in place.to.iterdir()} == {"hub", "one", ".fetched", ".state"}
    kept = {path.name.strip(".").partition(".")[0] for path in (place.to / ".fetched" / "one").iterdir()}
    assert len(kept) == 1  # of the one content, and its lock

    sent = sum(hub.sent.values())
    for text in ('{"adapters": [', "{}", None):
        if text is None:
            place.listing.unlink()
        else:
            place.listing.write_text(text)
        followed.step()
        followed.step()
    assert place.content("one") == "two"
    problems = [
        record.why for record in caplog.records if getattr(record, "about", "").startswith("the list")
    ]
    assert [problem.split()[-1] for problem in problems] == ["again.", "256.", f"'{place.listing}'"]

    again = place.sidecar()  # after a restart, what is there is only checked
    place.write(hub_entry)
    again.until(lambda: place.states().keys() == {"hub"} and place.state("hub") == "Fetched")
    assert place.content("one") is None and not (place.to / ".fetched" / "one").exists()
    assert sum(hub.sent.values()) == sent


def test_an_adapter_has_its_own_credentials_alone_and_they_are_shown_nowhere(place, hub, tmp_path, caplog):
    hub.token = TOKEN
    secret = tmp_path / "secret"
    secret.write_text(f"{TOKEN}\n")
    environment = {"HF_ENDPOINT": hub.endpoint}
    with_token = {"environment": environment, "files": {"HF_TOKEN": str(secret)}}
    gone = {"environment": environment, "files": {"HF_TOKEN": str(tmp_path / "gone")}}
    place.write(
        {"name": "with", "source": "hf://org/tiny", **with_token},
        {"name": "without", "source": "hf://org/tiny", "environment": environment},
        {"name": "gone", "source": "hf://org/tiny", **gone},
    )
    followed = place.sidecar(HF_TOKEN=TOKEN)
    followed.until(lambda: [state for state, _ in place.states().values()].count("Failed") == 2)
    followed.until(lambda: place.state("with") == "Fetched")
    states = place.states()
    assert "Give a token" in states["without"][1]
    assert "gone cannot be read (FileNotFoundError). Check the Secret" in states["gone"][1]
    written = b"".join(path.read_bytes() for path in place.to.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written and TOKEN not in repr([vars(one) for one in caplog.records])
    (tmp_path / "gone").write_bytes(b"\xff")
    place.write({"name": "gone", "source": "hf://org/tiny", **gone, "anonymous": True})
    followed.until(lambda: "UnicodeDecodeError" in place.states().get("gone", ("", ""))[1])
    (tmp_path / "gone").write_bytes(b"\0")
    place.write({"name": "gone", "source": "hf://org/tiny", **gone})
    followed.until(lambda: "no text that a variable can have" in place.states().get("gone", ("", ""))[1])


def test_keys_of_a_bucket_need_no_session_token(place, s3, tmp_path):
    bucket, endpoint = s3
    publish(bucket, "support", FILES)
    (tmp_path / "id").write_text(KEY)
    (tmp_path / "secret").write_text(SECRET)
    files = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "none"}
    place.write({
        "name": "support",
        "source": "s3://models/support",
        "environment": {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"},
        "files": {name: str(tmp_path / file) for name, file in files.items()},
    })  # fmt: skip
    place.sidecar().until(lambda: place.state("support") == "Fetched")
    assert (place.to / "support" / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_what_fails_is_logged_once_and_tried_again(place, monkeypatch, caplog):
    monkeypatch.setattr("quire_server.fetch.adapter_plan._FIRST_DELAY", 0.01)
    place.to.mkdir()
    (place.to / "one").mkdir()  # of a person
    place.write(place.from_claim("one", "one"), place.from_claim("later", "later"))
    followed = place.sidecar()
    failures = followed.sidecar._failures
    followed.until(lambda: all(name in failures and failures[name].count > 1 for name in ("one", "later")))
    assert "Remove what is there" in place.states()["one"][1]
    assert [record.adapter for record in caplog.records if "not fetched" in record.message].count("one") == 1
    (place.to / "one").rmdir()
    (place.claims / "volume" / "two").rename(place.claims / "volume" / "later")
    followed.until(lambda: place.content("one") == "one" and place.content("later") == "two")


def test_a_state_that_cannot_be_written_stops_nothing_and_is_written_later(place, caplog):
    (place.to / ".state" / "one.json").mkdir(parents=True)
    place.write(place.from_claim("one", "one"))
    followed = place.sidecar()
    followed.until(lambda: place.content("one") == "one")
    assert [record.about for record in caplog.records if "tried again" in record.message] == [
        "the state one.json"
    ]
    (place.to / ".state" / "one.json").rmdir()
    followed.until(lambda: place.state("one") == "Fetched")


def test_a_download_that_cannot_be_started_is_a_failure_of_its_adapter(place, monkeypatch):
    place.write(place.from_claim("one", "one"))
    followed = place.sidecar()

    def refused(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as limited:
        limited.setattr(subprocess, "Popen", refused)
        followed.until(lambda: place.state("one") == "Failed")
    assert "cannot be started (Resource temporarily unavailable)" in place.states()["one"][1]


def test_an_adapter_that_has_no_room_is_failed_and_the_others_are_fetched(place, hub):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    place.write(
        {"name": "large", "source": "hf://org/tiny", "environment": {"HF_ENDPOINT": hub.endpoint}},
        place.from_claim("one", "one"),
    )
    with place.process(preexec_fn=small_files) as process:
        place.wait(lambda: place.state("large") == "Failed" and place.content("one") == "one")
        process.terminate()
    assert "There is no room for adapter_model.safetensors" in place.states()["large"][1]
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_at_once_and_its_downloads_with_it(number, place, hub):
    hold = threading.Event()
    hub.before_piece = hold.wait
    place.write({"name": "hub", "source": "hf://org/tiny", "environment": {"HF_ENDPOINT": hub.endpoint}})
    with place.process() as process:
        place.wait(lambda: any(host == "store" for host, *_ in hub.requests))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(number)
        process.wait(10)
    place.wait(lambda: not any(_runs(child) for child in children))
    hold.set()
    assert process.returncode == (0 if number == signal.SIGTERM else -number)
    assert place.content("hub") is None


def _runs(pid):
    """Whether a process runs: one that has ended may not be reaped yet."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_download_that_was_killed_from_outside_has_a_sentence_and_one_whose_entry_left_ends(place, hub):
    hold = threading.Event()
    hub.before_piece = hold.wait
    entry = {"name": "hub", "source": "hf://org/tiny", "environment": {"HF_ENDPOINT": hub.endpoint}}
    place.write(entry)
    followed = place.sidecar()
    running = followed.sidecar._running
    size = len(FILES[CONFIG]) + len(FILES[WEIGHTS])
    stated = place.to / ".state" / "hub.json"
    followed.until(lambda: stated.exists() and json.loads(stated.read_text())["total_bytes"] == size)
    assert place.state("hub") == "Fetching"
    os.kill(running["hub"]._process.pid, signal.SIGKILL)
    followed.until(lambda: place.state("hub") == "Failed")
    assert "was ended by signal 9" in place.states()["hub"][1]
    place.write({**entry, "anonymous": True})
    followed.until(lambda: "hub" in running)
    place.write()
    followed.until(lambda: not running and not (place.to / ".fetched" / "hub").exists())
    assert place.states() == {}
    hold.set()
