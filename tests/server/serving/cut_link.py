"""Run in a network namespace of its own: the leader of a group, and its worker in a second namespace. The
link between them is cut in the middle of answers.

`python -m tests.server.serving.cut_link MODEL DIRECTORY SIDE [FLAGS]` prints what was seen as JSON. SIDE: the
end of the link that is set down: `near`, the leader's, or `far`, where the leader's interface stays up and
nothing arrives any more.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from pathlib import Path

from e2e.ports import free_ports
from tests.server.launch import Server
from tests.server.serving.lost_peer import CLIENT, SERVER, Peer, run
from tests.server.serving.test_lost_ranks import Stream, left_behind, shared_memory

LIMIT_SECONDS = 30.0  # after which the scenario gives up, and says what it has seen
EXACT = ("--dtype", "float32", "--quantization", "none", "--nodes", "2", "--leader-address", SERVER)
STREAMS = 3
PORTS = free_ports(2)  # of both nodes, as in pods: ranks of other settings are refused


def node(model, directory, rank, address, *flags, within=()):
    """The server of one node. Clients come over the loopback interface, which no link is part of."""
    directory.mkdir()
    place = ("--node-rank", str(rank), "--pod-address", address, "--host", "0.0.0.0")
    return Server(model, directory, *EXACT, *place, *flags, within=within, ports=PORTS)


def reaches(address, port):
    """Whether a connection can be made."""
    try:
        with socket.create_connection((address, port), 0.5):
            return True
    except OSError:
        return False


class Watch(threading.Thread):
    """Waits until a condition holds; `seconds` is how long it took, None where it never did."""

    def __init__(self, begun, condition):
        super().__init__(daemon=True)
        self._begun, self._condition, self.seconds = begun, condition, None
        self.start()

    def run(self):
        while time.monotonic() < self._begun + LIMIT_SECONDS:
            if self._condition():
                self.seconds = time.monotonic() - self._begun
                return
            time.sleep(0.01)  # between polls of what has no event

    def result(self):
        """The seconds."""
        self.join()
        return self.seconds


def are_gone(pids):
    """Whether none of these processes exists or is more than an exit code."""

    def condition():
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    return False
        return True

    return condition


def listening():
    """The ports on which a process of this network namespace listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted(int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A")


def scenario(leader, worker, peer, side):
    """What was seen, by name; seconds are counted from just before the link is set down."""
    ranks = [list(server.ranks().values()) for server in (leader, worker)]
    processes, run_dir = list(leader.children().values()), leader.run_dir()
    paths = shared_memory(processes)
    streams = [Stream(leader) for _ in range(STREAMS)]
    leader.wait("streams", lambda: all(len(stream.lines) > 5 for stream in streams))
    before = reaches(CLIENT, worker.health_port)
    begun = time.monotonic()
    if side == "near":
        run("ip", "link", "set", "near", "down")
    else:
        peer.run("ip", "link", "set", "far", "down")
    gone = [Watch(begun, are_gone(pids)) for pids in ranks]
    ends = [Watch(begun, lambda stream=stream: not stream.is_alive()) for stream in streams]
    cut = {
        "reached_before": before,
        "reached_after": reaches(CLIENT, worker.health_port),
        "state": run("ip", "-brief", "link", "show", "near").split()[1],
    }
    seen = {
        "cut": cut,
        "ranks": [len(pids) for pids in ranks],
        "gone": [watch.result() for watch in gone],
        "streams_ended": [watch.result() for watch in ends],
        "errors": [stream.error for stream in streams],
    }
    codes = [server.wait_end(LIMIT_SECONDS) for server in (leader, worker)]
    left = left_behind(leader, paths, run_dir, [*processes, *ranks[0]])
    return {
        **seen,
        "codes": codes,
        "reason": leader.failure(),
        "shared": len(paths),
        "left_behind": left,
        "listening": listening(),
    }


def main(model, directory, side, *flags):
    peer = Peer()
    try:
        peer.run("ip", "link", "set", "lo", "up")
        with (
            node(model, directory / "leader", 0, SERVER, *flags) as leader,
            node(model, directory / "worker", 1, CLIENT, *flags, within=peer.within) as worker,
        ):
            leader.wait("the group serves", lambda: worker.ended() or leader.probe("readyz") == 200)
            sys.stdout.write(json.dumps(scenario(leader, worker, peer, side)))
    finally:
        peer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
