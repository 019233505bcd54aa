"""The interface by which other nodes reach a rank is that of its pod's address."""

import socket

import pytest

from quire_server import network_interface
from quire_server.errors import ConfigError
from quire_server.network_interface import interface_of


@pytest.mark.parametrize(
    ("address", "family"),
    [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("localhost", None)],
)
def test_the_loopback_addresses_are_those_of_lo(address, family):
    found = interface_of(address)
    assert found.name == "lo" and found.family == (family or found.family)


def test_every_address_of_this_host_is_found_on_the_interface_that_has_it():
    found = {}
    for index, address in network_interface._addresses():
        family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
        found[socket.inet_ntop(family, address)] = socket.if_indextoname(index)
    assert found["127.0.0.1"] == "lo"
    for address, name in found.items():
        if not address.startswith("fe80"):  # each interface may have that one
            assert interface_of(address).name == name


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.77", r"an address of no interface here \(.*lo.*\): give one of this node's"),
        ("2001:db8::77", "an address of no interface here"),
        ("no-such-host.invalid", "no address"),
        ("x" * 300, "no address"),
    ],
)
def test_an_address_of_another_host_is_refused(address, said):
    with pytest.raises(ConfigError, match=f"--pod-address {address} is {said}"):
        interface_of(address)
