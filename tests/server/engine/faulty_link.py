"""A proxy between two servers, over TCP or a unix socket, that fails at a given byte of a connection."""

import contextlib
import os
import socket
import threading

from quire_server.kv_transfer.frames import HEADER


class FaultyLink:
    """Forwards connections to ``target``, an address of TCP or a unix socket. ``next_fault`` is asked for
    each: None, or (kind, number of the byte at which it happens). `reject` closes at once; in what comes back
    `kill` closes, `freeze` is silent from then on, `corrupt` flips one bit; `corrupt_request` flips one of
    what is sent.
    """

    def __init__(self, target, next_fault):
        self.happened = []
        self.target = target
        self._next_fault = next_fault
        self._listener = self._made()
        if isinstance(target, tuple):
            self._listener.bind(("127.0.0.1", 0))
        else:
            self._listener.bind("")  # a name that Linux chooses
        self._listener.listen()
        self._open = []
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError), self._listener:
            while True:
                near = self._listener.accept()[0]
                fault = self._next_fault()
                if fault is not None and fault[0] == "reject":
                    self.happened.append("reject")
                    near.close()
                    continue
                far = self._made()
                far.connect(self.target)
                self._open += [near, far]
                for source, sink, answers in ((near, far, False), (far, near, True)):
                    arguments = (source, sink, _for(fault, answers))
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _made(self):
        return socket.socket(socket.AF_INET if isinstance(self.target, tuple) else socket.AF_UNIX)

    def _forward(self, source, sink, fault):
        kind, left = fault or ("", 1 << 60)
        with contextlib.suppress(OSError), contextlib.ExitStack() as descriptors:
            while True:
                data, received, *_ = socket.recv_fds(source, 1 << 16, 1)
                for each in received:
                    descriptors.callback(os.close, each)
                if not data:
                    break
                if len(data) > left >= 0:
                    self.happened.append(kind)
                    if kind == "freeze":
                        return
                    if kind == "kill":
                        break
                    data = data[:left] + bytes([data[left] ^ 4]) + data[left + 1 :]
                left -= len(data)
                if received:  # with the last piece that was read, which is a header: what is before has none
                    sink.sendall(data[: -HEADER.size])
                    data = data[-HEADER.size :]
                    socket.send_fds(sink, [data], received)
                else:
                    sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _for(fault, answers):
    """The part of a fault that concerns one direction."""
    if fault is None or (fault[0] == "corrupt") != answers and fault[0].startswith("corrupt"):
        return None
    return fault if answers or fault[0] == "corrupt_request" else None
