"""A model on a hub with Hugging Face's HTTP API: one listing with sizes and digests, then files by commit.

HF_ENDPOINT names another hub; HF_TOKEN, or the file named by HF_TOKEN_PATH, holds the token. Files are read
at the commit that was listed, so a branch that moves during the download does not mix files.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from quire_server.errors import ConfigError, DownloadError
from quire_server.fetch.http_client import HttpClient, Subject, is_loopback
from quire_server.fetch.source import Check, HubModel, Listing, RemoteFile

_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


class HubClient:
    """A ``SourceClient``."""

    def __init__(self, http: HttpClient, model: HubModel, environ: Mapping[str, str]) -> None:
        self._http = http
        self._model = model
        self._endpoint = _endpoint(environ.get("HF_ENDPOINT") or _ENDPOINT)
        token = _token(environ)
        if token and not (
            self._endpoint.startswith("https://") or is_loopback(urlsplit(self._endpoint).netloc)
        ):
            raise ConfigError(
                "HF_TOKEN goes over HTTPS only: write HF_ENDPOINT with https://, or drop the token."
            )
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._subject = Subject(
            f"the model {model.repo} at revision {model.revision}",
            f"Give {'another' if token else 'a'} token, one that may read it, in HF_TOKEN, and accept "
            "the model's terms on its page.",
            "Check the name and the revision.",
        )

    def list_files(self, revision: str) -> Listing:
        """The listing of a commit."""
        revision = quote(revision or self._model.revision, safe="")
        url = f"{self._endpoint}/api/models/{self._model.repo}/revision/{revision}?blobs=true"
        document = self._http.get_json(url, self._subject, self._headers)
        commit, siblings = document.get("sha"), document.get("siblings")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise self._unexpected()
        return Listing(commit, tuple(self._file(entry, commit) for entry in siblings))

    def read(self, file: RemoteFile, offset: int) -> Generator[bytes, None, None]:
        """One file at the listed commit."""
        return self._http.read(file.place, self._subject, self._headers, offset)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _file(self, entry: Any, commit: str) -> RemoteFile:
        name, size = (entry.get("rfilename"), entry.get("size")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or type(size) is not int or size < 0:
            raise self._unexpected()
        place = f"{self._endpoint}/{self._model.repo}/resolve/{commit}/{quote(name)}"
        check = _check(entry)
        return RemoteFile(name, size, check, check.hex if check else commit, place)

    def _unexpected(self) -> DownloadError:
        return DownloadError(
            f"{urlsplit(self._endpoint).hostname} describes {self._subject.what} in a way that is not "
            "understood. "
            "Check HF_ENDPOINT."
        )


def _check(entry: Mapping[str, Any]) -> Check | None:
    """sha256 of large files, git's blob digest of the others."""
    lfs, blob = entry.get("lfs"), entry.get("blobId")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        return Check("sha256", sha256)
    if isinstance(blob, str) and _SHA1.fullmatch(blob) and not lfs:
        return Check("git-sha1", blob)
    return None


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ConfigError(
            "HF_ENDPOINT must be an address such as https://hub.example.com, without credentials."
        )
    return text.rstrip("/")


def _token(environ: Mapping[str, str]) -> str:
    token = environ.get("HF_TOKEN", "").strip()
    if path := environ.get("HF_TOKEN_PATH") if not token else None:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"HF_TOKEN_PATH names a file that cannot be read ({type(error).__name__})."
            ) from None
    if token and not _TOKEN.fullmatch(token):
        raise ConfigError("The token in HF_TOKEN has characters that no token has. Set it again.")
    return token
