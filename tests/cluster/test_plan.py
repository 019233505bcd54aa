"""`up` says what it will change before it changes it."""

from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

from e2e.cluster.layout import Addresses, Checkout
from e2e.cluster.plan import Facts, describe

CHECKOUT = Checkout.at(Path("/srv/quire"))
READY = Facts(
    missing_packages=(),
    unbuilt_programs=(),
    addresses=Addresses(IPv4Network("10.192.144.0/20")),
    sysctls={"vm/overcommit_memory": "1", "kernel/panic": "10"},
    needs_bridge_module=False,
)
BARE = Facts(
    missing_packages=("containerd", "runc"),
    unbuilt_programs=("kube", "helm"),
    addresses=READY.addresses,
    sysctls={"vm/overcommit_memory": "0", "kernel/panic": "10"},
    needs_bridge_module=True,
)


def test_a_bare_machine_is_told_everything_that_it_will_get() -> None:
    text = describe(CHECKOUT, BARE)
    assert "apt-get install containerd runc" in text
    assert "kube helm" in text
    assert "vm.overcommit_memory 0 -> 1" in text
    assert "kernel.panic " not in text  # it has that value already
    assert "br_netfilter" in text


def test_a_prepared_machine_is_told_only_what_changes() -> None:
    text = describe(CHECKOUT, READY)
    assert "apt-get" not in text
    assert "sysctls    none" in text
    assert "br_netfilter" not in text


def test_the_network_is_named_as_it_will_be_found() -> None:
    text = describe(CHECKOUT, READY)
    for name in (CHECKOUT.veth, "10.192.144.0/20", "10.192.144.1", CHECKOUT.cgroup, str(CHECKOUT.run)):
        assert name in text


def test_a_second_node_is_named_where_it_is_asked_for() -> None:
    assert f"/{CHECKOUT.of_node(2).cgroup}" not in describe(CHECKOUT, READY)
    two = replace(READY, addresses=replace(READY.addresses, nodes=2))
    text = describe(CHECKOUT, two)
    assert f"/{CHECKOUT.cgroup}, /{CHECKOUT.of_node(2).cgroup}" in text
    assert "2 namespaces" in text
