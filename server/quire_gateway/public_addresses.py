"""Which addresses the gateway connects to when an object names the server: those of the public network.

Checked for the address that is connected to, after names are resolved, so that no name can stand for the
cluster, for this pod or for the metadata service of a cloud. Networks of the operator's choice are allowed
besides; link-local addresses and those of metadata services never are.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Any

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
#: IPv6 addresses whose last four bytes are an IPv4 address that a translator connects to.
_TRANSLATED = (ip_network("64:ff9b::/96"), ip_network("::/96"), ip_network("::ffff:0:0:0/96"))
#: The prefix for translators of one's own, in which an IPv4 address may begin at one of these bits.
_LOCAL_TRANSLATED, _BEGINS = IPv6Network("64:ff9b:1::/48"), (48, 56, 64, 96)
#: Services of clouds for their own machines, such as the metadata of Azure, Oracle, Alibaba, AWS, Google, in
#: networks that count as public or that an operator may allow.
_CLOUD_SERVICES = (
    *(ip_network("168.63.129.16"), ip_network("192.0.0.192"), ip_network("100.100.100.200")),
    *(ip_network("fd00:ec2::/32"), ip_network("fd20:ce::254"), ip_network("fd00:c1::a9fe:a9fe")),
)
#: Special networks by IANA's registries that `ipaddress` takes for public ones in some releases of Python.
_SPECIAL = (
    *(ip_network("192.0.0.0/24"), ip_network("192.88.99.0/24"), ip_network("fec0::/10"), _LOCAL_TRANSLATED),
    *(ip_network("5f00::/16"), ip_network("3fff::/20")),
)

#: Where a cluster's own Services are, unless it uses public addresses.
CLUSTER_NETWORKS: tuple[Network, ...] = (
    *(ip_network("10.0.0.0/8"), ip_network("172.16.0.0/12"), ip_network("192.168.0.0/16")),
    *(ip_network("100.64.0.0/10"), ip_network("fc00::/7")),
)


class AddressRefusedError(OSError):
    """The gateway does not connect to this address."""


class AddressGuard:
    """Makes the sockets of connections, for allowed addresses alone."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def allows(self, address: Address) -> bool:
        """Whether it may be connected to."""
        return all(self._is_allowed(one) for one in _meanings(address))

    def socket(self, addr_info: tuple[Any, ...]) -> socket.socket:
        """That of a connection, by an entry of getaddrinfo. Raises AddressRefusedError."""
        family, kind, protocol, _, target = addr_info
        if not self.allows(ip_address(target[0].partition("%")[0])):
            raise AddressRefusedError(errno.EACCES, f"{target[0]} is not a public address")
        return socket.socket(family, kind, protocol)

    def _is_allowed(self, address: Address) -> bool:
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            return False
        if _is_in(address, _CLOUD_SERVICES):
            return False
        return _is_in(address, self._networks) or (address.is_global and not _is_in(address, _SPECIAL))


def _is_in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _meanings(address: Address) -> Iterator[Address]:
    """The address, and the IPv4 addresses that it may stand for."""
    if isinstance(address, IPv4Address):
        yield address
        return
    if (inner := address.ipv4_mapped or address.sixtofour) is not None:
        yield inner
    elif address.teredo is not None:
        yield from address.teredo
    elif address in _LOCAL_TRANSLATED:
        found = (_embedded(address, begin) for begin in _BEGINS)
        yield from (one for one in found if one.packed[0])  # 0.0.0.0/8 is where none begins
    elif _is_in(address, _TRANSLATED) and not (address.is_loopback or address.is_unspecified):
        yield _embedded(address, 96)
    if address.ipv4_mapped is None:
        yield address


def _embedded(address: IPv6Address, begin: int) -> IPv4Address:
    """The IPv4 address from this bit on. The ninth byte is not a part of it (RFC 6052)."""
    packed = address.packed
    rest = packed[12:] if begin == 96 else packed[begin // 8 : 8] + packed[9:]
    return IPv4Address(rest[:4])
