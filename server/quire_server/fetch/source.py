"""What a source is called: `hf://org/name@revision`, `s3://bucket/prefix`, `gs://bucket/prefix`,
`oci://registry/repository:tag@sha256:...`.

Called by `command`. Pure: knows names, and nothing of what they lead to. No source carries credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire_server.core.errors import ConfigError

_REPO_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"(?P<repo>{_REPO_PART}(/{_REPO_PART})?)(@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/+-]{{0,199}}))?"
)
_BUCKET = re.compile(
    r"(?P<bucket>[a-z0-9][a-z0-9._-]{1,221}[a-z0-9])(/(?P<prefix>[^\x00-\x1f\x7f?#*\[\]]{0,900}))?"
)
# As the distribution specification has it.
_OCI_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_OCI = re.compile(
    r"(?P<registry>localhost|[A-Za-z0-9-]+(?=:)|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+)(?P<port>:[0-9]{1,5})?"
    rf"/(?P<repository>{_OCI_PART}(/{_OCI_PART})*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub that speaks Hugging Face's protocol. `revision`: branch, tag or commit."""

    repo: str
    revision: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Objects with a common prefix. `scheme`: s3 or gs."""

    scheme: str
    path: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact in a registry. `reference`: a digest where one is given, a tag otherwise."""

    registry: str
    repository: str
    reference: str


def parse(text: str) -> HubModel | Bucket | Artifact:
    """The source that a text names; raises ConfigError."""
    scheme, found, rest = text.partition("://")
    match scheme if found else "":
        case "hf" if matched := _HUB.fullmatch(rest):
            revision = matched["revision"] or "main"
            if ".." not in revision.split("/"):
                return HubModel(matched["repo"], revision)
        case "s3" | "gs" if matched := _BUCKET.fullmatch(rest):
            prefix = (matched["prefix"] or "").strip("/")
            if ".." not in prefix.split("/"):
                return Bucket(scheme, f"{matched['bucket']}/{prefix}".rstrip("/"))
        case "oci" if matched := _OCI.fullmatch(rest):
            registry = matched["registry"] + (matched["port"] or "")
            return Artifact(registry, matched["repository"], matched["digest"] or matched["tag"] or "latest")
    raise ConfigError(
        f"{_harmless(text)!r} names no model. Write hf://org/name@revision, s3://bucket/prefix, "
        "gs://bucket/prefix "
        "or oci://registry/repository:tag, without credentials in it."
    )


def _harmless(text: str) -> str:
    """What may be shown of a text that somebody put a password into."""
    return re.sub(r"://[^/]*@", "://***@", text)[:100]
