"""Ports of ranks and of KV transfers when the process has no descriptor left: they take connections again as
soon as there are some.
"""

import logging
import os
import queue
import resource
import select
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from quire_server import peer_auth
from quire_server.engine import rank_channel, step_codec
from quire_server.engine.rank_admission import Admission
from quire_server.engine.rank_channel import Identity
from quire_server.engine.rank_endpoint import RankListener
from quire_server.peer_auth import Acceptor, UnprovedConnections
from tests.server.kv_transfer.fake_server import FakeProducer

ADDRESS, KEY = "127.0.0.1", b"k" * 32
FAILED = "a connection cannot be accepted"
NUM_ATTEMPTS = 5


def listen(role, directory):
    """In the process with the limit: something that listens, and where."""
    if role == "ranks of several nodes":
        return (listener := RankListener(ADDRESS, 0, lambda: KEY)), listener.port
    if role == "kv transfers":
        return (producer := FakeProducer(directory)), producer.address[1]
    own = Identity(step_codec.VERSION, "", "image", "model", "arguments")
    admission = Admission(rank_channel.listen(directory, 8), own, size=2)
    threading.Thread(target=admission.admit, args=(60.0,), daemon=True).start()
    return admission, directory / rank_channel.SOCKET_NAME


def connect(where):
    """A connection of someone who does not speak the protocol, and so is answered."""
    is_path = not where.isdecimal()
    connection = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    connection.settimeout(10)
    connection.connect(where if is_path else (ADDRESS, int(where)))
    return connection


def is_answered(connection):
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
    return bool(connection.recv(1))


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(role, directory):
    """Listen; use up all descriptors and prove it at the first line of the input, have them again at the
    second. What is logged goes to stderr.
    """
    logging.basicConfig(stream=sys.stderr)
    attempts, accept = [], socket.socket.accept

    def counted(listener):
        try:
            return accept(listener)
        except OSError as error:
            attempts.append(error)
            if len(attempts) == NUM_ATTEMPTS:
                say("tried")
            raise

    socket.socket.accept = counted
    _listening, where = listen(role, Path(directory))
    say(where)
    sys.stdin.readline()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        os.dup(0)
    except OSError as error:
        say(error.strerror)
    sys.stdin.readline()
    for descriptor in taken:
        os.close(descriptor)
    sys.stdin.readline()


@contextmanager
def process(role, directory):
    with subprocess.Popen(
        [sys.executable, "-m", "tests.server.test_acceptor", role, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("role", ["ranks of a pod", "ranks of several nodes", "kv transfers"])
def test_a_port_outlasts_a_time_without_descriptors_and_says_so_once(role, tmp_path):
    with process(role, tmp_path) as listening:
        where = listening.stdout.readline().strip()
        with connect(where):  # stays open, or its descriptor would be free
            listening.stdin.write("use them up\n")
            listening.stdin.flush()
            assert listening.stdout.readline() == "Too many open files\n", "the fault took effect"
            # A call that waits has its descriptor already.
            with connect(where), connect(where) as waiting:
                assert listening.stdout.readline() == "tried\n", "several times"
                assert not select.select([waiting], [], [], 0)[0], "it waits in the kernel's queue"
                listening.stdin.write("have them again\n")
                listening.stdin.flush()
                assert is_answered(waiting), "the port goes on"
        with connect(where) as later:
            assert is_answered(later)
        listening.stdin.close()
        said = listening.stderr.read()
    assert said.count(FAILED) == 1, said


def test_a_connection_for_which_no_thread_can_be_started_is_closed_and_the_next_one_served(monkeypatch):
    started, served, unproved = [], queue.SimpleQueue(), UnprovedConnections()
    start = peer_auth.threading.Thread.start

    def limited(thread):
        started.append(thread)
        if len(started) == 2:  # after the acceptor's own
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(peer_auth.threading.Thread, "start", limited)
    with socket.create_server((ADDRESS, 0)) as listener:
        acceptor = Acceptor(listener, unproved, served.put, "test")
        with socket.create_connection(listener.getsockname(), 5) as refused:
            assert refused.recv(1) == b""
        with socket.create_connection(listener.getsockname(), 5), served.get(timeout=60):
            acceptor.close()
            started[0].join(5)
    assert not started[0].is_alive(), "closed"


if __name__ == "__main__":
    main(*sys.argv[1:])
