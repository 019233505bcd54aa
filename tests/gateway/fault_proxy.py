"""A TCP proxy in front of a replica, which fails as networks and replicas do."""

import contextlib
import socket
import struct
import threading
import time

RESET = struct.pack("ii", 1, 0)


class FaultProxy:
    """A context manager. Faults, each of connections that come later or of what comes next over open ones:

    refuse       connections are reset at once
    hang         requests are taken, and nothing comes back
    cut_after    so many events of an answer are passed on and half of the next one, then a reset
    ends         a cut is an end of the connection, which overtakes nothing that was sent, and no reset
    drop_reused  a connection that has served a request is closed when the next one comes
    delay        what the replica answers comes so many seconds later
    answer       bytes that are sent in place of what the replica answers
    closes       the connection ends after them
    """

    def __init__(self, port):
        self.target = port
        self.refuse = self.hang = self.drop_reused = self.ends = self.closes = False
        self.cut_after = self.answer = None
        self.delay = 0.0
        self.num_connections = 0
        self.requests = []  # what came in, a piece each
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._listener.close()
        for each in self._open:
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # the end of the test closes it
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                if self.refuse:
                    _reset(client)
                    continue
                try:
                    replica = socket.create_connection(("127.0.0.1", self.target))
                except ConnectionRefusedError:
                    _reset(client)
                    continue
                self._open += [client, replica]
                threading.Thread(target=self._send, args=(client, replica), daemon=True).start()
                threading.Thread(target=self._answer, args=(client, replica), daemon=True).start()

    def _send(self, client, replica):
        """What the gateway sends."""
        num_requests = 0
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                self.requests.append(data)
                num_requests += data.startswith(b"POST")
                if self.drop_reused and num_requests > 1:
                    client.shutdown(socket.SHUT_RDWR)
                    break
                if self.answer is not None:
                    client.sendall(self.answer)
                    if self.closes:
                        client.shutdown(socket.SHUT_RDWR)
                        break
                elif not self.hang:
                    replica.sendall(data)
        with contextlib.suppress(OSError):
            replica.shutdown(socket.SHUT_RDWR)

    def _answer(self, client, replica):
        """What the replica sends."""
        seen = b""
        with contextlib.suppress(OSError):
            while data := replica.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)  # the fault itself
                if self.cut_after is not None:
                    seen += data
                    parts = seen.split(b"data: ")
                    if len(parts) > self.cut_after + 1:
                        kept = b"data: ".join(parts[: self.cut_after + 1]) + b'data: {"id'
                        client.sendall(kept[len(seen) - len(data) :])
                        if not self.ends:
                            _reset(client)
                            return
                        break
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _reset(client):
    """Close with a reset. A thread that reads keeps a socket open, so its reading is ended first."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RD)
    client.close()
