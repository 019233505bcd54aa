"""One throw-away certificate authority per life of a cluster, and everything it signs.

Knows names and files, nothing of processes.
"""

import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID_FOR = datetime.timedelta(days=365)
API_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True)
class Identity:
    """Who a certificate says its holder is, and under which names it serves."""

    name: str  # of the files
    common_name: str
    groups: tuple[str, ...] = ()
    serves: tuple[str, ...] = ()


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.certificate = directory / "ca.crt"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire-cluster")])
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_CA_USAGE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(directory / "ca.key", self._key)

    def issue(self, identity: Identity) -> None:
        """Writes `<name>.crt` and `<name>.key`, good for both ends of a connection."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self.certify(identity, key.public_key())
        path = self.directory / f"{identity.name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(self.directory / f"{identity.name}.key", key)

    def certify(self, identity: Identity, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """The certificate itself."""
        groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in identity.groups]
        subject = x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, identity.common_name)])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(subject, self._name, key).add_extension(usage, critical=False)
        # Python 3.13 and later refuse a chain without this one.
        builder = builder.add_extension(issuer_key, critical=False)
        if identity.serves:
            names = x509.SubjectAlternativeName([_general_name(name) for name in identity.serves])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue_token_key(self) -> None:
        """Writes `sa.key` and `sa.pub`, which sign and check ServiceAccount tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(self.directory / "sa.key", key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.directory / "sa.pub").write_bytes(public)


_CA_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def admin_identity() -> Identity:
    """The user of the kubeconfig: everything is allowed to it."""
    return Identity("admin", "quire-admin", groups=("system:masters",))


def api_server_identity(addresses: Sequence[str]) -> Identity:
    """The API server under the names that pods use and the addresses at which it listens."""
    return Identity("apiserver", "kube-apiserver", serves=("127.0.0.1", *addresses, *API_NAMES))


def kubeconfig(directory: Path, user: str, url: str) -> str:
    """A kubeconfig (JSON is YAML) for a user of `directory`, by reference to its files."""
    cluster = {"server": url, "certificate-authority": str(directory / "ca.crt")}
    credentials = {
        "client-certificate": str(directory / f"{user}.crt"),
        "client-key": str(directory / f"{user}.key"),
    }
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "quire",
            "clusters": [{"name": "quire", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "quire", "context": {"cluster": "quire", "user": user}}],
        },
        indent=2,
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALID_FOR)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
