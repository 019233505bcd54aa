"""Where a model's files come from, and where they are kept when they are downloaded. Part of `tree`.

The expressions admit only what `quire-server fetch` takes (tests/contracts try it), and no credentials.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_operator.spec.bounds import choice, items, number, quantity, required_text, text
from quire_operator.spec.references import (
    DNS_1123_SUBDOMAIN,
    HTTP_ADDRESS,
    PRINTABLE,
    EnvVar,
    ObjectRef,
    SecretKeyRef,
)

_REPO_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
HUB_REPO = rf"{_REPO_PART}(/{_REPO_PART})?"
HUB_REVISION = r"[A-Za-z0-9][A-Za-z0-9_+-]*([./][A-Za-z0-9_+-]+)*"
OBJECTS = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._=+,-]*)*/?"
_OCI_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_OCI_HOST = r"((localhost|[a-z0-9-]+(\.[a-z0-9-]+)+)(:[0-9]{1,5})?|[a-z0-9-]+:[0-9]{1,5})"
OCI_REFERENCE = (
    rf"{_OCI_HOST}/{_OCI_PART}(/{_OCI_PART})*(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
)


@dataclass(frozen=True, kw_only=True)
class PersistentVolumeClaim:
    claim_name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    path: str = text(PRINTABLE, 512)


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    repo: str = required_text(HUB_REPO, 193)
    revision: str = text(HUB_REVISION, 200)
    endpoint: str = text(HTTP_ADDRESS, 256)
    token_secret_ref: SecretKeyRef | None = None


@dataclass(frozen=True, kw_only=True)
class S3:
    uri: str = required_text(f"s3://{OBJECTS}", 900)
    endpoint: str = text(HTTP_ADDRESS, 256)
    region: str = text(r"[a-z0-9-]+", 64)
    credentials_secret_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True)
class GCS:
    uri: str = required_text(f"gs://{OBJECTS}", 900)
    credentials_secret_ref: SecretKeyRef | None = None


@dataclass(frozen=True, kw_only=True)
class OCI:
    reference: str = required_text(OCI_REFERENCE, 512)
    pull_secret_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Exactly one of them."""

    pvc: PersistentVolumeClaim | None = None
    hugging_face: HuggingFace | None = None
    s3: S3 | None = None
    gcs: GCS | None = None
    oci: OCI | None = None

    @property
    def uri(self) -> str:
        """What `quire-server fetch` is told; empty for a claim, which holds the model already."""
        if self.hugging_face is not None:
            return f"hf://{self.hugging_face.repo}@{self.hugging_face.revision or 'main'}"
        if self.oci is not None:
            return f"oci://{self.oci.reference}"
        bucket = self.s3 or self.gcs
        return bucket.uri if bucket is not None else ""

    @property
    def endpoint(self) -> str:
        """The address of a hub or a store of one's own, if one is given."""
        own = self.hugging_face or self.s3
        return own.endpoint if own is not None else ""


@dataclass(frozen=True, kw_only=True)
class Download:
    timeout_seconds: int = number(60, 604_800, 7200)
    env: tuple[EnvVar, ...] = items(32)
    ca_bundle_config_map_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True)
class ModelCache:
    mode: str = field(metadata={"enum": ["SharedPVC", "PerReplica", "None"]})
    size: str = quantity()
    storage_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    access_mode: str = field(default="", metadata={"enum": ["ReadWriteMany", "ReadWriteOnce"]})
    existing_claim: str = field(
        default="", metadata={"pattern": f"^{DNS_1123_SUBDOMAIN}$", "maxLength": 253, "minLength": 1}
    )
    retain_policy: str = choice("Delete", "Retain")
    download: Download = Download()

    @property
    def is_shared(self) -> bool:
        """Whether one claim serves all pods, filled by a Job before there are any."""
        return self.mode == "SharedPVC"

    @property
    def is_of_one_node(self) -> bool:
        """Whether one node at a time can mount that claim."""
        return self.is_shared and self.access_mode == "ReadWriteOnce"
