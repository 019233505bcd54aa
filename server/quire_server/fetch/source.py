"""Sources of models: their URLs (``hf://org/name@revision``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
``oci://registry/repository:tag@sha256:...``, ``file:///directory``), and the interface of their clients: list
files, read one from an offset.

Knows no protocol. URLs contain no credentials.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol
from urllib.parse import unquote

from quire_server.errors import ConfigError

_REPO_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"(?P<repo>{_REPO_PART}(/{_REPO_PART})?)(@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/+-]{{0,199}}))?"
)
_BUCKET = re.compile(
    r"(?P<bucket>[a-z0-9][a-z0-9._-]{1,221}[a-z0-9])(/(?P<prefix>[^\x00-\x1f\x7f?#*\[\]]{0,900}))?"
)
# As in the distribution specification.
_OCI_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_OCI = re.compile(
    r"(?P<registry>localhost|[A-Za-z0-9-]+(?=:)|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+)(?P<port>:[0-9]{1,5})?"
    rf"/(?P<repository>{_OCI_PART}(/{_OCI_PART})*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub with Hugging Face's API. ``revision``: branch, tag or commit."""

    repo: str
    revision: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Objects with a common prefix. ``scheme``: s3 or gs."""

    scheme: str
    path: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact in a registry. ``reference``: its digest if one is given, else a tag."""

    registry: str
    repository: str
    reference: str


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory of this machine, such as a mounted volume's."""

    path: PurePosixPath


def parse(text: str) -> HubModel | Bucket | Artifact | LocalDirectory:
    """The source that a URL names. Raises ConfigError."""
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
        case "file" if rest.startswith("/"):
            path = PurePosixPath(unquote(rest))
            if ".." not in path.parts and "\0" not in str(path):
                return LocalDirectory(path)
    raise ConfigError(
        f"{_redacted(text)!r} names no model. Write hf://org/name@revision, s3://bucket/prefix, "
        "gs://bucket/prefix, oci://registry/repository:tag or file:///directory, without credentials in it."
    )


def _redacted(text: str) -> str:
    """The text without a password that it may contain."""
    return re.sub(r"://[^/]*@", "://***@", text)[:100]


CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """A digest promised by the source. ``algorithm``: sha256, md5, or git-sha1 (of git's blob object)."""

    algorithm: str
    hex: str


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. ``version`` changes with the content; ``place`` is how the client addresses the file."""

    name: str
    size: int
    check: Check | None
    version: str
    place: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a model at one moment. ``revision``: its immutable name, empty if the source has none."""

    revision: str
    files: tuple[RemoteFile, ...]


class SourceClient(Protocol):
    """Reads one source. Raises AccessDeniedError, ModelNotFoundError, or DownloadError, which may be
    retried.
    """

    def list_files(self, revision: str) -> Listing:
        """The files, at an immutable revision if one is given."""

    def read(self, file: RemoteFile, offset: int) -> Generator[bytes, None, None]:
        """The bytes from an offset on, in chunks; may end early. Close the generator when done."""

    def close(self) -> None:
        """Close connections."""
