"""Paths and addresses are decided without touching the machine."""

import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from e2e.cluster import node
from e2e.cluster.errors import HostError
from e2e.cluster.layout import ADDRESSES, Addresses, Checkout, Cluster, choose_block, foreign_kubeconfig


def test_a_checkout_keeps_its_block_as_long_as_nothing_is_in_the_way() -> None:
    checkout = Checkout.at(Path("/srv/quire"))
    first = choose_block(checkout.id, [])
    assert first == choose_block(checkout.id, [IPv4Network("0.0.0.0/0"), IPv4Network("192.0.2.0/24")])
    assert first.subnet_of(ADDRESSES)


@pytest.mark.parametrize("prefix", [12, 20, 24, 32])
def test_a_block_never_overlaps_what_the_host_routes_already(prefix: int) -> None:
    checkout = Checkout.at(Path("/srv/quire"))
    wanted = choose_block(checkout.id, [])
    taken = IPv4Network((wanted.network_address, 32)).supernet(new_prefix=prefix)
    assert not choose_block(checkout.id, [taken]).overlaps(taken)


def test_many_checkouts_get_blocks_that_do_not_overlap() -> None:
    taken: list[IPv4Network] = []
    for number in range(200):
        taken.append(choose_block(Checkout.at(Path(f"/srv/quire-{number}")).id, taken))
    assert len(set(taken)) == 200


def test_a_machine_with_no_room_says_so() -> None:
    with pytest.raises(HostError, match="stop clusters|remove routes"):
        choose_block("00000000", [ADDRESSES])


def test_link_pods_and_services_share_the_block_without_overlap() -> None:
    addresses = Addresses(IPv4Network("10.192.144.0/20"))
    parts = [addresses.link, addresses.pods, addresses.services]
    assert all(part.subnet_of(addresses.block) for part in parts)
    assert not any(one.overlaps(other) for one in parts for other in parts if one is not other)
    assert addresses.pods.num_addresses > 2 * 110  # the kubelet's pods, and as many that are still going
    assert addresses.dns_ip in addresses.services
    assert addresses.node_ip != addresses.host_ip


def test_two_checkouts_share_no_name_on_the_host() -> None:
    one, other = Checkout.at(Path("/srv/a")), Checkout.at(Path("/srv/b"))
    assert {one.run, one.veth, one.cgroup}.isdisjoint({other.run, other.veth, other.cgroup})
    assert len(one.veth) <= 15  # what the kernel allows


def test_a_checkout_is_the_same_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Checkout.at(tmp_path / "link") == Checkout.at(tmp_path / "real")


def test_sockets_have_short_paths_however_deep_the_checkout_lies() -> None:
    checkout = Checkout.at(Path("/" + "deep/" * 40))
    for path in (checkout.socket, checkout.kubelet / "device-plugins/kubelet.sock"):
        assert len(str(path)) < 108  # sockaddr_un


def test_only_a_kubeconfig_that_is_not_this_checkouts_names_another_cluster() -> None:
    checkout = Checkout.at(Path("/srv/quire"))
    assert foreign_kubeconfig(checkout, {}) is None
    assert foreign_kubeconfig(checkout, {"KUBECONFIG": ""}) is None
    assert foreign_kubeconfig(checkout, {"KUBECONFIG": "/srv/quire/.cluster/kubeconfig"}) is None
    assert foreign_kubeconfig(checkout, {"KUBECONFIG": "/home/me/.kube/config"}) == "/home/me/.kube/config"


def test_programs_enter_the_namespace_without_losing_the_cgroup_mounts() -> None:
    cluster = Cluster(Checkout.at(Path("/srv/quire")), Addresses(IPv4Network("10.192.0.0/20")))
    command = cluster.in_netns(["true", "--flag"])
    assert command[0] == "nsenter"
    assert command[-3:] == ["--", "true", "--flag"]


def test_two_nodes_share_no_address_and_no_file_of_their_own() -> None:
    one = Cluster(Checkout.at(Path("/srv/quire")), Addresses(IPv4Network("10.192.144.0/20"), nodes=2))
    (two,) = one.others
    parts = [one.addresses.link, one.addresses.wire, one.addresses.services, one.addresses.pods]
    parts.append(two.addresses.pods)
    assert not any(left.overlaps(right) for left in parts for right in parts if left is not right)
    assert all(part.subnet_of(one.addresses.block) for part in parts)
    assert (one.name, two.name) == ("node-1", "node-2") and one.url == two.url
    for path in (
        "run",
        "netns",
        "socket",
        "kubelet",
        "pod_files",
        "pod_logs",
        "config",
        "containerd",
        "cgroup",
    ):
        assert getattr(one.checkout, path) != getattr(two.checkout, path), path
    for path in ("pki", "bin", "kubeconfig", "records", "claim", "log"):
        assert getattr(one.checkout, path) == getattr(two.checkout, path), path


def test_what_a_second_node_has_is_taken_away_with_the_first() -> None:
    one = Checkout.at(Path("/srv/quire"))
    two = one.of_node(2)
    assert {two.pod_files, two.config} <= set(one.disposable)
    assert two.run.is_relative_to(one.run) and two.own.is_relative_to(one.state)


def test_one_node_has_all_addresses_of_pods() -> None:
    addresses = Addresses(IPv4Network("10.192.144.0/20"))
    assert addresses.pods == addresses.all_pods


def test_a_second_node_finds_images_and_api_server_on_the_first() -> None:
    one = Cluster(Checkout.at(Path("/srv/quire")), Addresses(IPv4Network("10.192.144.0/20"), nodes=2))
    (two,) = one.others
    files = node.files_of_other(two)
    assert f"http://{one.addresses.wire_ip}:5000" in files["registries/localhost:5000/hosts.toml"]
    assert f"{two.checkout.config}/registries" in files["containerd.toml"]
    assert one.url in files["kubelet.kubeconfig"]
    assert json.loads(files["kubelet.json"])["cgroupRoot"] == f"/{two.checkout.cgroup}"
    assert json.loads(node.files(one)["registry.json"])["http"]["addr"] == ":5000"
