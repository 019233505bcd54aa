"""A rank that is killed or stopped at any moment ends the whole server in seconds: each stream gets an error,
nothing is left behind, and the next start answers as the first did. `RANK_KILLS`: how many of each.
"""

import contextlib
import json
import logging
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.server import tiny_model
from tests.server.launch import NO_TLS, Server

logger = logging.getLogger(__name__)

KILLS = int(os.environ.get("RANK_KILLS", "1"))
RANKS = 2
FLAGS = ("--dtype", "float32", "--quantization", "none", "--tensor-parallel-size", str(RANKS))
FIXED = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}
BUSY_SECONDS = 2.0  # room for a machine on which other tests run
RESTART_SECONDS = 10.0
#: Exit codes: rank 0 misses an echo, or the supervisor a rank's beats. Whoever is first.
STOPPED = [70, 72]

pytestmark = pytest.mark.timeout(600 + 60 * KILLS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


class Stream(threading.Thread):
    """A client that reads a long answer to its end."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self._url, self.lines = server.url + "/v1/completions", []
        self.start()

    def run(self):
        body = {**FIXED, "max_tokens": 1900, "stream": True}
        with (
            contextlib.suppress(httpx.TransportError),  # what came until then is looked at
            httpx.stream("POST", self._url, json=body, timeout=60, verify=NO_TLS) as response,
        ):
            self.lines.extend(line for line in response.iter_lines() if line)

    @property
    def error(self):
        """The error that ended the stream, None where there was none. A busy machine may need a while for its
        tokens, but each second has some.
        """
        while self.is_alive():
            received = len(self.lines)
            self.join(60)
            assert not self.is_alive() or len(self.lines) > received, "a stream hangs"
        events = [line.removeprefix("data: ") for line in self.lines if "[DONE]" not in line]
        return json.loads(events[-1]).get("error") if events else None


class LastStatus(threading.Thread):
    """Reads /statusz until there is none."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self._url, self.document = server.health_url + "/statusz", {}
        self.start()

    def run(self):
        try:
            while True:
                self.document = httpx.get(self._url, timeout=5, verify=NO_TLS).json()
                time.sleep(0.05)  # between polls: the last answer before the end is wanted
        except httpx.TransportError:
            return


def shared_memory(pids):
    """Files in memory that these processes share."""
    maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in maps if "/dev/shm/" in line}


def left_behind(server, paths, run_dir, pids):
    """What is left of a server: its directory, processes, shared memory, ports."""
    found = [str(path) for path in {run_dir, *paths} if path.exists()]
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run_dir).encode() in each.read_bytes():
                found.append(str(each))
        except OSError:
            continue  # it ended meanwhile
    found += [f"pid {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    for port in (server.port, server.health_port):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
    return found


def lose(server, signum, victim, dice):
    """Stop or kill a process beside streams; returns (seconds until all had ended, the last status)."""
    pids, run_dir = list(server.children().values()), server.run_dir()
    paths = shared_memory(pids)
    assert paths, "the heartbeat, for one"
    pid = server.children()["api"] if victim == "api" else server.ranks()[victim]
    streams = [Stream(server) for _ in range(3)]
    server.wait("streams", lambda: all(len(stream.lines) > 5 for stream in streams))
    status = LastStatus(server)
    threading.Event().wait(dice.uniform(0, 0.3))
    began_at = time.monotonic()
    os.kill(pid, signum)
    code = server.wait_end()
    took = time.monotonic() - began_at
    assert code in ([137] if signum == signal.SIGKILL else STOPPED)
    if victim != "api":
        assert [stream.error for stream in streams if stream.error is None] == []
    assert left_behind(server, paths, run_dir, pids) == []
    status.join(60)
    return took, status.document


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("signum", "limit"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 5.0)])
def test_a_rank_that_is_lost_at_any_moment_ends_all_of_the_server(tiny, tmp_path, signum, limit):
    dice, golden, lost_at, seconds = random.Random(11), None, None, []
    victims = [0, 1, "api"] if signum == signal.SIGKILL else [0, 1]
    for number in range(KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        started_at = time.monotonic()
        with Server(tiny, directory, *FLAGS) as server:
            server.wait_ready()
            if lost_at is not None:
                assert time.monotonic() - lost_at <= time.monotonic() - started_at + RESTART_SECONDS
            text = server.post("/v1/completions", FIXED).json()["choices"][0]["text"]
            golden = golden or text
            assert text == golden, f"after {number} losses"
            victim, lost_at = victims[number % len(victims)], time.monotonic()
            took, status = lose(server, signum, victim, dice)
            seconds.append(took)
            logger.info("%s of %s: all ended after %.2f s", signal.Signals(signum).name, victim, took)
            check_who_is_named(server, signum, victim, status)
    logger.info("%d of %d, the slowest %.2f s", len(seconds), KILLS, max(seconds))
    assert max(seconds) <= limit + BUSY_SECONDS, seconds


def check_who_is_named(server, signum, victim, status):
    """In the log, in the termination message, and in /statusz."""
    log = server.log.read_text()
    if signum == signal.SIGKILL:
        name = {"api": "API", 0: "engine"}.get(victim, f"rank {victim}")
        assert f"the {name} process was ended by SIGKILL" in log
        if victim != "api":  # without it the server ends before anybody has read a status
            assert status["reason"] == "Killed"
            assert name in status["silent"]
            assert [rank["rank"] for rank in status["ranks"] if rank["missing"]] == [victim]
        return
    assert f"ank {victim}" in server.failure()["message"]
    assert f"ank {victim}" in log
    assert [rank["rank"] for rank in status["ranks"] if rank["missing"]] == [victim]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        ("rank_exit:after=60,rank=1", 1),
        ("rank_exit:after=60,rank=0,late", 0),
        ("rank_freeze:after=60,rank=1,late", 1),
        ("rank_freeze:after=60,rank=0", 0),
    ],
)
def test_a_rank_that_fails_before_or_after_an_exchange_ends_the_server(tiny, tmp_path, fault, victim):
    with Server(tiny, tmp_path, *FLAGS, fault=fault).wait_ready() as server:
        pids, run_dir = list(server.children().values()), server.run_dir()
        paths, streams = shared_memory(pids), [Stream(server) for _ in range(2)]
        server.wait_fault(fault.partition(":")[0])
        assert server.wait_end() in STOPPED
        assert [stream.error for stream in streams if stream.error is None] == []
        assert left_behind(server, paths, run_dir, pids) == []
        message = server.failure()["message"]
        assert f"rank {victim}" in message or (victim == 0 and "engine" in message), message


@pytest.mark.deep
def test_a_stopped_rank_is_noticed_without_any_request(tiny, tmp_path):
    with Server(tiny, tmp_path, *FLAGS).wait_ready() as server:
        os.kill(server.ranks()[1], signal.SIGSTOP)
        assert server.wait_end() == 72
        assert "rank 1 (last step" in server.failure()["message"]


@pytest.mark.deep
def test_a_slow_rank_changes_no_answer(tiny, tmp_path):
    fixed, found = {**FIXED, "max_tokens": 100}, []
    for fault in ("", "rank_delay:rank=1,seconds=0.02"):
        with Server(tiny, tmp_path, *FLAGS, fault=fault).wait_ready() as server:
            found.append(server.post("/v1/completions", fixed).json()["choices"][0]["text"])
    assert found[0] == found[1]


@pytest.mark.deep
def test_a_pause_of_all_processes_ends_nothing(tiny, tmp_path):
    """As a node or a virtual machine is paused: afterwards no process has beaten for as long."""
    with Server(tiny, tmp_path, *FLAGS).wait_ready() as server:
        pids = [*server.children().values(), server.process.pid]
        stream = Stream(server)
        server.wait("a stream", lambda: len(stream.lines) > 5)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(5.0)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        assert stream.error is None
        assert server.post("/v1/completions", FIXED).status_code == 200


def test_a_rank_of_another_revision_is_refused_by_that_reason(tiny, tmp_path):
    with Server(tiny, tmp_path, *FLAGS, fault="rank_revision:rank=1") as server:
        assert server.wait_end() == 79
        failure = server.failure()
        assert failure["reason"] == "MixedRevision"
        assert "rank 1 has another revision than rank 0" in failure["message"]


@pytest.mark.deep
def test_random_bytes_to_the_socket_of_the_ranks_are_refused_and_the_server_lives(tiny, tmp_path):
    """While the server waits for its ranks; afterwards there is no such socket."""
    with Server(tiny, tmp_path, *FLAGS) as server:
        server.wait("all processes", lambda: len(server.ranks()) == RANKS)
        other, path = server.ranks()[1], server.run_dir() / "ranks.sock"
        os.kill(other, signal.SIGSTOP)
        server.wait("rank 0 listens", path.exists)
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(path))
                stranger.sendall(os.urandom(4096))
        os.kill(other, signal.SIGCONT)
        server.wait_ready()
        assert "a connection to the ranks' socket is refused" in server.log.read_text()
        assert not path.exists()
        assert server.post("/v1/completions", FIXED).status_code == 200
