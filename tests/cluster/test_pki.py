"""Certificates say who is who and serve under the names that clients use."""

import ipaddress
import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from e2e.cluster import control_plane, node, pki
from e2e.cluster.layout import Addresses, Checkout, Cluster

CLUSTER = Cluster(Checkout.at(Path("/srv/quire")), Addresses(IPv4Network("10.192.144.0/20")))


def _issued(directory: Path, identity: pki.Identity) -> x509.Certificate:
    pki.Authority(directory).issue(identity)
    return x509.load_pem_x509_certificate((directory / f"{identity.name}.crt").read_bytes())


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_the_api_server_serves_under_every_address_that_clients_use(tmp_path: Path) -> None:
    server = next(i for i in control_plane.identities(CLUSTER) if i.name == "apiserver")
    names = _names(_issued(tmp_path, server))
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"127.0.0.1", "10.192.144.2", "10.192.152.1"}
    assert "kubernetes.default.svc" in names.get_values_for_type(x509.DNSName)
    assert CLUSTER.addresses.api_service_ip == ipaddress.ip_address("10.192.152.1")


def test_the_kubelet_is_a_node_to_the_authorizer(tmp_path: Path) -> None:
    subject = _issued(tmp_path, node.identity(CLUSTER)).subject
    assert [a.value for a in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["system:node:node-1"]
    assert [a.value for a in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["system:nodes"]


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    _issued(tmp_path, pki.admin_identity())
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*.key")} == {0}


def test_every_certificate_comes_from_the_authority(tmp_path: Path) -> None:
    certificate = _issued(tmp_path, pki.admin_identity())
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)


@pytest.mark.parametrize("name", [i.name for i in control_plane.identities(CLUSTER)])
def test_no_program_of_the_cluster_is_an_administrator_without_need(name: str) -> None:
    groups = next(i.groups for i in control_plane.identities(CLUSTER) if i.name == name)
    assert ("system:masters" in groups) == (name in {"admin", "kubelet-client"})


def test_every_kubeconfig_names_certificates_that_are_issued() -> None:
    issued = {i.name for i in (*control_plane.identities(CLUSTER), node.identity(CLUSTER))}
    configs = {n: json.loads(t) for n, t in node.files(CLUSTER).items() if n.endswith(".kubeconfig")}
    used = {Path(c["users"][0]["user"]["client-certificate"]).stem for c in configs.values()}
    assert configs and used <= issued
