"""A server beside `quire-server fetch-adapters`: adapters of a list come and go without any restart."""

import json
import os
import subprocess
import sys
import threading

import pytest

from tests.server import adapter_files
from tests.server.fetch.hub_server import COMMIT, HubServer
from tests.server.launch import Server

TEXT = "Once upon a time, in a"


@pytest.fixture(scope="module")
def claims(tiny, tmp_path_factory):
    claims = tmp_path_factory.mktemp("claims")
    adapter_files.write(claims / "volume" / "one", tiny, seed=1)
    adapter_files.write(claims / "volume" / "two", tiny, seed=2)
    adapter_files.write(claims / "volume" / "dora", tiny, use_dora=True)
    return claims


@pytest.fixture(scope="module")
def hub(tiny, tmp_path_factory):
    directory = adapter_files.write(tmp_path_factory.mktemp("hub") / "adapter", tiny, seed=3)
    server = HubServer({path.name: path.read_bytes() for path in directory.iterdir()})
    yield server
    server.close()


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes the list; ``write.path`` is its file."""
    path = tmp_path_factory.mktemp("list") / "adapters.json"

    def write(*entries):
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"adapters": entries}))
        os.replace(new, path)

    write.path = path
    return write


@pytest.fixture(scope="module")
def server(tiny, claims, write, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fetching-server")
    folder = directory / "adapters"
    write()
    arguments = ("--list", write.path, "--to", folder, "--claims", claims)
    command = [sys.executable, "-m", "quire_server", "fetch-adapters", *map(str, arguments)]
    flags = ("--max-adapters", "2", "--adapters-dir", str(folder))
    with (directory / "sidecar-log").open("wb") as log, subprocess.Popen(command, stderr=log) as sidecar:
        try:
            with Server(tiny, directory, *flags) as server:
                server.wait_ready()
                yield server
            assert sidecar.poll() is None
        finally:
            sidecar.terminate()


def entries(server):
    return {one["name"]: one for one in server.statusz()["adapters"]}


def states(server):
    return {name: entry["state"] for name, entry in entries(server).items()}


def ask(server, model):
    body = {"model": model, "prompt": TEXT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)


def text_of(server, model):
    answer = ask(server, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_adapters_of_a_list_come_change_and_go_beside_broken_ones_without_a_restart(
    server, claims, hub, write
):
    def from_claim(name, directory):
        return {"name": name, "path": f"{claims}/volume/{directory}"}

    from_hub = {"name": "hub", "source": "hf://org/tiny", "environment": {"HF_ENDPOINT": hub.endpoint}}
    hold = threading.Event()
    hub.before_piece = hold.wait
    assert ask(server, "one").status_code == 404
    broken = (from_claim("dora", "dora"), from_claim("none", "none"), from_claim("tiny", "one"))
    write(from_hub, *broken, from_claim("one", "one"))
    failed = dict.fromkeys(("dora", "none", "tiny"), "Failed")
    wanted = {"hub": "Fetching", "one": "Ready", **failed}
    server.wait("all but the one that is held", lambda: states(server) == wanted)
    found = entries(server)
    assert "use_dora" in found["dora"]["reason"] and "no directory" in found["none"]["reason"]
    assert "as the model itself is" in found["tiny"]["reason"]
    server.wait("its size is known", lambda: entries(server)["hub"]["total_bytes"] > 0)
    assert entries(server)["hub"]["bytes"] < entries(server)["hub"]["total_bytes"]
    first = text_of(server, "one")
    assert first != text_of(server, "tiny") and ask(server, "hub").status_code == 404

    hold.set()
    server.wait("the held one", lambda: states(server)["hub"] == "Ready")
    assert entries(server)["hub"]["revision"] == COMMIT
    assert text_of(server, "hub") not in (first, text_of(server, "tiny"))

    write(from_hub, from_claim("one", "two"))
    server.wait("the new content of a name", lambda: text_of(server, "one") != first)
    assert states(server) == {"hub": "Ready", "one": "Ready"}
    write(from_claim("one", "two"))
    server.wait("it is dropped", lambda: ask(server, "hub").status_code == 404)
    server.wait("it is not stated", lambda: states(server) == {"one": "Ready"})
    text_of(server, "one")
