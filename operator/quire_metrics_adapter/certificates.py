"""The replica's own certificate authority and serving certificate, created in memory.

No key is written to disk or into a Secret, so the authority ends with the replica. `bundle` computes the
caBundle of an APIService: the authorities of all replicas that may be alive. Sends no request and reads no
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY = "quire-metrics-adapter"
_SERVING = "quire-metrics-adapter serving"
_SKEW = timedelta(hours=1)  # clock skew to the API server
_MAX_NAME = 64  # characters, by X.520
# Nine replicas with two authorities each during renewal, and some that ended recently.
MAX_AUTHORITIES = 32


@dataclass(frozen=True)
class Credentials:
    """The serving certificate and key as PEM. `authority` is empty for a certificate that was mounted."""

    chain: bytes
    key: bytes
    authority: bytes = b""
    renew_at: datetime | None = None


def issue(pod_name: str, hosts: Sequence[str], now: datetime, lifetime: timedelta) -> Credentials:
    """A new authority and a certificate of it for `hosts`, valid until `now` + `lifetime`."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority_name = _name(_AUTHORITY, pod_name)
    until = now + lifetime
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _builder(_name(_SERVING, pod_name), authority_name, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Credentials(
        chain=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        authority=authority.public_bytes(serialization.Encoding.PEM),
        renew_at=now + lifetime / 2,
    )


def bundle(current: bytes, own: Sequence[bytes], pod_name: str, now: datetime) -> bytes:
    """`current` with `own` in place of the authorities that this pod had before; unchanged where it is right
    already.

    Other replicas' authorities stay until they expire, because their liveness cannot be seen from here.
    Certificates that no adapter created are removed.
    """
    known = _read(current)
    mine = [certificate for pem in own for certificate in _read(pem)]
    others = [
        certificate
        for certificate in known
        if _common_name(certificate) == _AUTHORITY
        and certificate.subject != _name(_AUTHORITY, pod_name)
        and certificate.not_valid_after_utc > now
    ]
    others.sort(key=lambda certificate: certificate.not_valid_before_utc, reverse=True)
    wanted = {*mine, *others[: MAX_AUTHORITIES - len(mine)]}
    if wanted == set(known):
        return current
    # Sorted, so that all replicas write the same order.
    ordered = sorted(wanted, key=lambda certificate: certificate.fingerprint(hashes.SHA256()))
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in ordered)


def _read(pem: bytes) -> list[x509.Certificate]:
    """No certificates for unreadable content, which is then replaced."""
    try:
        return x509.load_pem_x509_certificates(pem) if pem.strip() else []
    except ValueError:
        return []


def _common_name(certificate: x509.Certificate) -> str:
    return "".join(str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME))


def _name(common_name: str, unit: str) -> x509.Name:
    end = unit[-_MAX_NAME:]  # the part that differs between the pods of a Deployment
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, end),
        ]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(until)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
