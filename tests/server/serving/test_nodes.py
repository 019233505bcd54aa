"""A model whose ranks are on two nodes, each with an address of its own: one answers, both end together."""

import contextlib
import functools
import os
import random
import signal
import socket
from pathlib import Path

import pytest

from e2e.ports import free_ports
from tests.server import adapter_files, tiny_model
from tests.server.launch import Server

EXACT = ("--dtype", "float32", "--quantization", "none", "--tensor-parallel-size", "2")
QUESTION = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
RANKS_PORT = 7600


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def addresses():
    """Of two nodes: all of 127.0.0.0/8 is this machine."""
    network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    return [f"{network}.1", f"{network}.2"]


def node(model, directory, rank, addresses, ports, *flags, **environ):
    """The server of one node, whose ports are those of the other."""
    directory.mkdir()
    server = Server(
        model,
        directory,
        *EXACT,
        *("--nodes", "2", "--node-rank", str(rank), "--leader-address", addresses[0]),
        *("--pod-address", addresses[rank], "--host", addresses[rank]),
        *("--port", str(ports[0]), "--health-port", str(ports[1])),
        *flags,
        **environ,
    )
    server.port, server.health_port = ports
    server.url, server.health_url = (f"http://{addresses[rank]}:{port}" for port in ports)
    return server


@pytest.fixture
def keys(tmp_path):
    """Directories of two Secrets."""
    found = [tmp_path / name for name in ("ours", "theirs")]
    for directory in found:
        directory.mkdir()
        (directory / "key").write_text(directory.name)
    return found


@pytest.fixture
def group(tiny, tmp_path, addresses, keys):
    ports, key = free_ports(2), ("--auth-key-dir", str(keys[0]))
    with (
        node(tiny, tmp_path / "leader", 0, addresses, ports, *key) as leader,
        node(tiny, tmp_path / "worker", 1, addresses, ports, *key) as worker,
    ):
        leader.wait_ready()
        worker.wait_ready()
        yield leader, worker


def text(server, model="tiny"):
    response = server.post("/v1/completions", {**QUESTION, "model": model})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def has_adapters(server, number):
    return [entry["state"] for entry in server.statusz()["adapters"]] == ["Ready"] * number


@pytest.mark.deep
def test_two_nodes_answer_as_one_process_does(group, tiny, tmp_path):
    leader, worker = group
    (tmp_path / "one").mkdir()
    with Server(tiny, tmp_path / "one", *EXACT[:4]).wait_ready() as one:
        assert text(leader) == text(one)
    assert set(leader.ranks()) == {0}
    assert set(worker.ranks()) == {1}
    assert [entry["rank"] for entry in worker.statusz()["ranks"]] == [1]
    first, second = leader.statusz()["ranks"]
    assert (first["rank"], second["rank"], second["tensorRank"]) == (0, 1, 1), "also that of the other node"
    assert first["lastStep"] == second["lastStep"] > 0
    assert first["stepSeconds"] > 0 and second["stepSeconds"] > 0
    assert first["host"] == second["host"] == socket.gethostname()
    assert (first["missing"], second["missing"], second["beatAge"]) == ("", "", None)
    assert not worker.reaches("/v1/models"), "a worker has no API"


@pytest.mark.deep
def test_stages_on_two_nodes_answer_as_one_process_does(tiny, tmp_path, addresses):
    ports, ranks = free_ports(2), ("--pipeline-parallel-size", "2")
    (tmp_path / "one").mkdir()
    with (
        node(tiny, tmp_path / "leader", 0, addresses, ports, *ranks) as leader,
        node(tiny, tmp_path / "worker", 1, addresses, ports, *ranks) as worker,
    ):
        leader.wait_ready()
        with Server(tiny, tmp_path / "one", *EXACT[:4]).wait_ready() as one:
            assert text(leader) == text(one)
        assert (set(leader.ranks()), set(worker.ranks())) == ({0, 1}, {2, 3})
        assert [entry["stage"] for entry in leader.statusz()["ranks"]] == [0, 0, 1, 1]
        assert [entry["stage"] for entry in worker.statusz()["ranks"]] == [1, 1]


@pytest.mark.deep
def test_two_nodes_answer_with_adapters_as_one_process_does(tiny, tmp_path, addresses):
    folder = tmp_path / "adapters"
    for number in (1, 2):
        adapter_files.write(folder / f"a{number}", tiny, seed=number)
    ports, flags = free_ports(2), ("--max-adapters", "1", "--adapters-dir", str(folder))
    (tmp_path / "one").mkdir()
    with (
        node(tiny, tmp_path / "leader", 0, addresses, ports, *flags) as leader,
        node(tiny, tmp_path / "worker", 1, addresses, ports, *flags),
        Server(tiny, tmp_path / "one", *EXACT[:4], *flags) as one,
    ):
        names = ("a1", "tiny", "a2", "a1")
        for server in (leader, one):
            server.wait_ready()
            server.wait("adapters", functools.partial(has_adapters, server, 2))
        answers = [text(one, name) for name in names]
        assert [text(leader, name) for name in names] == answers and len(set(answers)) == 3


@pytest.mark.deep
def test_a_killed_rank_of_another_node_ends_both_nodes(group):
    leader, worker = group
    os.kill(worker.ranks()[1], signal.SIGKILL)
    assert leader.wait_end() != 0
    assert worker.wait_end() != 0


@pytest.mark.deep
def test_a_killed_leader_ends_the_worker(group):
    leader, worker = group
    os.kill(leader.ranks()[0], signal.SIGKILL)
    assert leader.wait_end() != 0
    assert worker.wait_end() != 0


@pytest.mark.deep
def test_a_worker_that_is_to_end_serves_until_its_leader_has(group):
    leader, worker = group
    worker.terminate()
    worker.wait("the worker drains", lambda: worker.probe("readyz") == 503)
    assert text(leader)
    leader.terminate()
    assert leader.wait_end() == 0
    assert worker.wait_end() == 0


@pytest.mark.deep
def test_nobody_is_taken_in_once_the_group_is_complete(group, addresses):
    leader, _ = group
    with pytest.raises(OSError), socket.create_connection((addresses[0], RANKS_PORT), 2):
        pass
    assert text(leader)


@pytest.mark.deep
def test_random_bytes_before_the_worker_comes_do_not_harm(tiny, tmp_path, addresses):
    ports = free_ports(2)
    with node(tiny, tmp_path / "leader", 0, addresses, ports) as leader:
        stranger = leader.wait("it listens", lambda: connected(addresses[0]))
        with stranger:
            stranger.sendall(os.urandom(1 << 12))
        with node(tiny, tmp_path / "worker", 1, addresses, ports) as worker:
            leader.wait_ready()
            worker.wait_ready()
            assert text(leader)


def connected(address):
    try:
        return socket.create_connection((address, RANKS_PORT), 1)
    except OSError:
        return None


def test_a_node_with_another_key_is_not_taken_in_and_says_why(tiny, tmp_path, addresses, keys):
    ports, theirs = free_ports(2), ("--auth-key-dir", str(keys[1]))
    with (
        node(tiny, tmp_path / "leader", 0, addresses, ports, "--api-keys-dir", str(keys[0])) as leader,
        node(tiny, tmp_path / "stranger", 1, addresses, ports, *theirs) as stranger,
    ):
        leader.wait("it listens", lambda: connected(addresses[0])).close()
        assert stranger.wait_end() != 0
        failure = stranger.failure()
        assert f"The leader at {addresses[0]}" in failure["message"] and "another key" in failure["message"]
        assert "refused a connection to the ranks" in leader.log.read_text()
        assert leader.probe("startupz") == 503, "it waits for its worker"


def listening(address):
    """The ports on which this machine listens at this address."""
    number = int.from_bytes(socket.inet_aton(address), "little")
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    at = [line[1].split(":") for line in lines if line[3] == "0A"]
    return sorted(int(port, 16) for host, port in at if int(host, 16) == number)


@pytest.mark.deep
def test_random_bytes_to_every_port_of_a_group_end_nothing(group, addresses):
    leader, worker = group
    data, ports = random.Random(1).randbytes(1 << 12), [listening(address) for address in addresses]
    assert leader.port in ports[0] and RANKS_PORT not in ports[0]
    assert len(ports[0]) > 2, f"gloo listens beside HTTP: {ports}"
    for address, found in zip(addresses, ports, strict=True):
        for port in found:
            for sent in (b"", data[:1], data[:64], data):
                with socket.create_connection((address, port), 2) as stranger, contextlib.suppress(OSError):
                    stranger.sendall(sent)
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.settimeout(0.2)
                    stranger.recv(1 << 12)
    assert text(leader)
    assert [server.process.poll() for server in group] == [None, None]


@pytest.mark.deep
def test_a_worker_that_is_to_end_before_the_group_serves_waits_for_no_leader(tiny, tmp_path, addresses):
    with node(tiny, tmp_path / "worker", 1, addresses, free_ports(2)) as worker:
        worker.wait("its rank is started", lambda: worker.ranks())
        worker.terminate()
        assert worker.wait_end() == 0
