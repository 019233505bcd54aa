"""Run in a network namespace of its own: a server, and clients in a second namespace that vanishes.

`python -m tests.server.serving.lost_peer MODEL DIRECTORY` prints what was seen as JSON. The engine is stopped
while the server notices, so that no answer ends by itself.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.server.launch import Server

SERVER, CLIENT = "10.99.0.1", "10.99.0.2"
LIMIT_SECONDS = 60.0
ASK = {"model": "tiny", "prompt": "Once", "max_tokens": 16_000, "ignore_eos": True}
# Sends a request, prints a line for each piece of its answer, and keeps the connection.
CLIENT_PROGRAM = """
import socket, sys
body = sys.argv[2].encode()
head = f"POST /v1/completions HTTP/1.1\\r\\nhost: quire\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
with socket.create_connection((sys.argv[1], int(sys.argv[3]))) as connection:
    connection.sendall(head.encode() + body)
    print("sent", flush=True)
    while connection.recv(4096):
        print("received", flush=True)
"""


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Peer:
    """A network namespace at the other end of a veth."""

    def __init__(self):
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        self._holder.stdout.readline()  # it is in its namespace
        self._enter = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--")
        run("ip", "link", "set", "lo", "up")
        run(
            *("ip", "link", "add", "near", "type", "veth", "peer", "name", "far"),
            "netns",
            str(self._holder.pid),
        )
        run("ip", "address", "add", f"{SERVER}/24", "dev", "near")
        run("ip", "link", "set", "near", "up")
        self.run("ip", "address", "add", f"{CLIENT}/24", "dev", "far")
        self.run("ip", "link", "set", "far", "up")
        self._clients = []

    @property
    def within(self):
        """The command that runs another one there."""
        return self._enter

    def run(self, *command):
        return run(*self._enter, *command)

    def client(self, port, **more):
        """A client that has sent its request."""
        argv = [*self._enter, sys.executable, "-c", CLIENT_PROGRAM, SERVER, json.dumps(ASK | more), str(port)]
        client = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self._clients.append(client)
        assert client.stdout.readline() == "sent\n"
        return client

    def vanish(self):
        """Nothing that is sent to it arrives, and nothing comes from it: no reset, no end of a connection."""
        for chain in ("INPUT", "OUTPUT"):
            self.run("iptables", "-I", chain, "-j", "DROP")

    def dropped(self):
        """Packets that arrived and were dropped."""
        return int(self.run("iptables", "-nvxL", "INPUT").splitlines()[2].split()[0])

    def close(self):
        for process in (*self._clients, self._holder):
            process.kill()
            process.wait()


def scenario(server, peer):
    """What was seen, by name."""
    whole = peer.client(server.port)  # idle: nothing is sent before its answer's end
    stream = peer.client(server.port, stream=True)
    assert stream.stdout.readline() == "received\n"
    server.wait("both run", lambda: server.metric("llm_running_requests") == 2)
    used = server.metric("llm_kv_cache_utilization")
    peer.vanish()
    server.wait("packets of the stream are lost", lambda: peer.dropped() > 0)
    engine = server.children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    state = Path(f"/proc/{engine}/stat")
    server.wait("it is stopped", lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T")
    begun = time.monotonic()
    aborted = []
    while len(aborted) < 2 and time.monotonic() - begun < LIMIT_SECONDS:
        gone = int(server.metric("llm_requests_total", status="aborted"))
        aborted += [time.monotonic() - begun] * (gone - len(aborted))
        threading.Event().wait(0.2)
    os.kill(engine, signal.SIGCONT)
    resumed = time.monotonic()
    server.wait("the blocks are free", lambda: server.metric("llm_kv_cache_utilization") == 0)
    return {
        "used": used,
        "aborted": aborted,
        "freed": time.monotonic() - resumed,
        "clients_know": [client.poll() for client in (whole, stream)],
    }


def main(model, directory):
    peer = Peer()
    try:
        flags = (
            "--host",
            "0.0.0.0",
            "--kv-cache-memory-bytes",
            str(32 << 20),
            "--stall-timeout-seconds",
            "600",
        )
        with Server(model, directory, *flags) as server:
            sys.stdout.write(json.dumps(scenario(server.wait_ready(), peer)))
    finally:
        peer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
