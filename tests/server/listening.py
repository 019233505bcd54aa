"""The addresses on which a running server listens, as the kernel lists them, including unintended ones."""

import os
import socket
from pathlib import Path

_LISTEN = {
    "tcp": "0A",
    "tcp6": "0A",
    "udp": None,
    "udp6": None,
}  # UDP listens once it is bound
_ACCEPTS = 0x10000  # __SO_ACCEPTCON in the flags of /proc/net/unix


def addresses(server):
    """(family, address) of every socket on which any process of the server takes connections or datagrams."""
    held = {name for pid in _tree(server.process.pid) for name in _sockets(pid)}
    found = set()
    for table, state in _LISTEN.items():
        for fields in _rows(table):
            if fields[9] in held and state in (None, fields[3]):
                host, port = fields[1].split(":")
                found.add((socket.AF_INET, (_ipv4(host), int(port, 16))))
    for fields in _rows("unix"):
        if fields[6] in held and int(fields[3], 16) & _ACCEPTS:
            # The engine binds beside its socket's place and moves it there; the kernel keeps the first name.
            found.add((socket.AF_UNIX, fields[7].removesuffix(".new")))
    return found


def _rows(table):
    return [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]


def _ipv4(word):
    """As dotted; an IPv6 address stays a word."""
    return socket.inet_ntoa(bytes.fromhex(word)[::-1]) if len(word) == 8 else word


def _tree(pid):
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _tree(int(child))


def _sockets(pid):
    """The sockets that the process holds open; a running server closes others while they are listed."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]
