"""The network interface that has a given address of this host.

Ranks of several nodes are reached at their pod's address, and NCCL takes the name of an interface instead.
The kernel is asked by netlink, because Python's socket module has the names alone. Knows nothing of ranks.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from quire_server.errors import ConfigError

_MESSAGE = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # struct rtattr: length, type
_GET_ADDRESSES, _ERROR, _DONE = 22, 2, 3
_REQUEST_OF_ALL = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_OWN_ADDRESSES = (1, 2)  # IFA_ADDRESS and IFA_LOCAL; the first is the peer's on a link of two ends
_READ_SIZE = 1 << 16


class Interface(NamedTuple):
    """``family``: of the address by which it was found."""

    name: str
    family: socket.AddressFamily


def interface_of(address: str) -> Interface:
    """The interface with this address, which may be a name. Raises ConfigError where it is none of this
    host's.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        wanted = socket.inet_pton(family, str(found[0]).partition("%")[0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--pod-address {address} is no address: {error}") from None
    for index, own in _addresses():
        if own == wanted:
            return Interface(socket.if_indextoname(index), family)
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ConfigError(
        f"--pod-address {address} is an address of no interface here ({names}): give one of this node's, by "
        "which the other nodes reach it."
    )


def _addresses() -> Iterator[tuple[int, bytes]]:
    """The number of an interface and each of its addresses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.send(
            _MESSAGE.pack(_MESSAGE.size + len(request), _GET_ADDRESSES, _REQUEST_OF_ALL, 1, 0) + request
        )
        while True:
            for kind, body in _messages(kernel.recv(_READ_SIZE)):
                if kind in (_DONE, _ERROR):
                    return
                *_, index = _ADDRESS.unpack_from(body)
                for name, value in _attributes(body[_ADDRESS.size :]):
                    if name in _OWN_ADDRESSES:
                        yield index, value


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _MESSAGE.size:
        size, kind, *_ = _MESSAGE.unpack_from(data)
        yield kind, data[_MESSAGE.size : size]
        data = data[_aligned(size) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        size, name = _ATTRIBUTE.unpack_from(data)
        yield name, data[_ATTRIBUTE.size : size]
        data = data[_aligned(size) :]


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
