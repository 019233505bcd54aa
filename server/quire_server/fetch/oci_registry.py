"""A model as an OCI artifact: each layer is one file named by its title, as pushed by ORAS and ModelPack.

Implements the pull part of the distribution specification. Credentials come from the ``config.json`` in
DOCKER_CONFIG, as written by ``docker login`` and contained in a pull Secret. Plain HTTP is used only for a
registry on a loopback address.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx2

from quire_server.errors import AccessDeniedError, ConfigError, DownloadError, ModelCorruptError
from quire_server.fetch.http_client import (
    HttpClient,
    Subject,
    is_loopback,
    json_object,
    raise_for_status,
    read_bounded,
)
from quire_server.fetch.source import Artifact, Check, Listing, RemoteFile

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_ACCEPT = ", ".join((_MANIFEST, "application/vnd.docker.distribution.manifest.v2+json", *_INDEXES))
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class RegistryClient:
    """A ``SourceClient``."""

    def __init__(self, http: HttpClient, artifact: Artifact, environ: Mapping[str, str]) -> None:
        self._http = http
        self._artifact = artifact
        scheme = "http" if is_loopback(artifact.registry) else "https"
        self._base = f"{scheme}://{artifact.registry}/v2/{artifact.repository}"
        self._credentials = _credentials(environ, artifact.registry)
        self._authorization: dict[str, str] = {}
        self._lock = threading.Lock()
        self._subject = Subject(
            f"the artifact {artifact.repository}:{artifact.reference}",
            f"Give credentials for {artifact.registry}: a pull Secret, or DOCKER_CONFIG with its "
            "config.json.",
            "Check the repository and the tag or digest.",
        )

    def list_files(self, revision: str) -> Listing:
        """The layers of a manifest; ``revision`` is its digest."""
        reference = revision or self._artifact.reference
        for _ in range(2):
            body = self._get(f"{self._base}/manifests/{reference}")
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            if _DIGEST.fullmatch(reference) and digest != reference:
                raise ModelCorruptError(
                    f"{self._subject.what}: the manifest has the digest {digest}, not the asked one."
                )
            document = json_object(body, self._subject)
            if "manifests" not in document:
                return Listing(digest, tuple(self._files(document)))
            reference = self._only_manifest(document)
        raise self._unexpected("an index of indexes")

    def read(self, file: RemoteFile, offset: int) -> Generator[bytes, None, None]:
        """One blob. If the token has expired, a new one is requested."""
        with self._lock:
            headers = dict(self._authorization)
        try:
            yield from self._http.read(file.place, self._subject, headers, offset)
        except AccessDeniedError:
            self._authorize(file.place, {})
            yield from self._http.read(file.place, self._subject, self._authorization, offset)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _get(self, url: str) -> bytes:
        headers = {"Accept": _ACCEPT}
        self._authorize(url, headers)
        body, _ = self._http.get(url, self._subject, headers | self._authorization)
        return body

    def _authorize(self, url: str, headers: Mapping[str, str]) -> None:
        """Request the URL to learn which authentication the registry requires, and obtain it."""
        with self._lock, self._http.open(url, self._subject, {**headers, "Range": "bytes=0-0"}) as response:
            if response.status_code != 401:
                self._authorization = {}
                return
            asked = httpx2.URL(url)
            if (response.url.host, response.url.port) != (asked.host, asked.port):
                raise self._unexpected("a redirect to one who asks for credentials")
            scheme, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
            if scheme.lower() == "basic" and self._credentials:
                self._authorization = {"Authorization": f"Basic {self._credentials}"}
            elif scheme.lower() == "bearer":
                self._authorization = {
                    "Authorization": f"Bearer {self._token(dict(_PARAMETER.findall(rest)))}"
                }
            else:
                raise_for_status(response, url, self._subject)

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = challenge.get("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.netloc)):
            raise self._unexpected("a token service without HTTPS")
        query = {"scope": f"repository:{self._artifact.repository}:pull"}
        if "service" in challenge:
            query["service"] = challenge["service"]
        headers = {"Authorization": f"Basic {self._credentials}"} if self._credentials else {}
        url = f"{realm}{'&' if parts.query else '?'}{urlencode(query)}"
        with self._http.open(url, self._subject, headers) as response:
            raise_for_status(response, url, self._subject)
            document = json_object(read_bounded(response, self._subject), self._subject)
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise self._unexpected("no token")
        return token

    def _only_manifest(self, index: Mapping[str, Any]) -> str:
        manifests = index.get("manifests")
        entries = manifests if isinstance(manifests, list) else []
        digests = [entry.get("digest") for entry in entries if isinstance(entry, dict)]
        if len(digests) != 1 or not isinstance(digests[0], str) or not _DIGEST.fullmatch(digests[0]):
            raise self._unexpected("an index of several artifacts; name one of them by its digest")
        return digests[0]

    def _files(self, manifest: Mapping[str, Any]) -> Iterator[RemoteFile]:
        layers = manifest.get("layers")
        for layer in layers if isinstance(layers, list) else []:
            annotations = layer.get("annotations") if isinstance(layer, dict) else None
            if not isinstance(annotations, dict):
                continue
            title = next((annotations[key] for key in _TITLES if key in annotations), None)
            digest, size = layer.get("digest"), layer.get("size")
            if not isinstance(title, str) or "tar" in str(layer.get("mediaType")):
                continue
            if (
                not isinstance(digest, str)
                or not _DIGEST.fullmatch(digest)
                or type(size) is not int
                or size < 0
            ):
                raise self._unexpected("a layer without a sha256 digest and a size")
            check = Check("sha256", digest.removeprefix("sha256:"))
            yield RemoteFile(title, size, check, digest, f"{self._base}/blobs/{digest}")

    def _unexpected(self, what: str) -> DownloadError:
        return DownloadError(f"{self._artifact.registry} offers {what} for {self._subject.what}.")


def _credentials(environ: Mapping[str, str], registry: str) -> str:
    """base64 of user:password for this registry; empty without DOCKER_CONFIG. Raises ConfigError where it has
    none: a wrong pull Secret must not pass for a public artifact.
    """
    directory = environ.get("DOCKER_CONFIG")
    path = Path(directory) / "config.json" if directory else None
    if path is None or not path.exists():
        return ""
    try:
        auths = json.loads(path.read_bytes())["auths"]
        entry: dict[str, str] = next(
            (auths[key] for key in (registry, f"https://{registry}") if key in auths), {}
        )
        if "auth" not in entry and "username" in entry:
            return base64.b64encode(f"{entry['username']}:{entry['password']}".encode()).decode()
        found = base64.b64encode(base64.b64decode(entry.get("auth", ""), validate=True)).decode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The config.json of DOCKER_CONFIG cannot be used ({type(error).__name__}). Write it with "
            "docker login."
        ) from None
    if not found:
        raise ConfigError(
            f"The config.json of DOCKER_CONFIG has no credentials for {registry}. Add them with docker login "
            f"{registry}; or give no pull Secret, and the artifact is read anonymously."
        )
    return found
