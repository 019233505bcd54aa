"""HTTP for downloads: bounded responses, ranges, redirects that leak no credentials, errors by their cause.

Proxies come from HTTPS_PROXY and NO_PROXY, the CA bundle from SSL_CERT_FILE. Messages name the host and never
a URL, because URLs of signed downloads are credentials. A token is sent only to the host it is for and not to
the target of a redirect.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import ssl
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from quire_server import __version__
from quire_server.errors import AccessDeniedError, DownloadError, ModelNotFoundError

_CONNECT_SECONDS = 15.0
_MAX_REDIRECTS = 5
_MAX_JSON_BYTES = 32 << 20
_MAX_RETRY_SECONDS = 120.0
_ERROR_CODE = re.compile(r"[A-Za-z]{1,40}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is requested, as messages name it, and the remedies if access is denied or it is missing."""

    what: str
    if_denied: str
    if_missing: str


class HttpClient:
    """One connection pool, used by several threads."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._client = httpx2.Client(
            verify=ssl.create_default_context(),
            timeout=httpx2.Timeout(stall_seconds, connect=min(stall_seconds, _CONNECT_SECONDS)),
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            headers={"User-Agent": f"quire-server/{__version__}", "Accept-Encoding": "identity"},
            event_hooks={"response": [_refuse_downgrade]},
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    @contextlib.contextmanager
    def open(self, url: str, subject: Subject, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """The response with any status, its body unread. Transport errors become DownloadError."""
        host = httpx2.URL(url).host
        try:
            with self._client.stream("GET", url, headers=dict(headers)) as response:
                yield response
        except httpx2.TimeoutException:
            raise DownloadError(
                f"{host} sent nothing for {self._stall_seconds:g} seconds while {subject.what} was read. "
                "Check the "
                "network, the proxy (HTTPS_PROXY, NO_PROXY) and the host."
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise DownloadError(f"{subject.what} could not be read from {host}: {_cause(error)}.") from None

    def get(self, url: str, subject: Subject, headers: Mapping[str, str]) -> tuple[bytes, httpx2.Headers]:
        """A complete small body with its headers; raises by status."""
        with self.open(url, subject, headers) as response:
            raise_for_status(response, url, subject)
            return read_bounded(response, subject), response.headers

    def get_json(self, url: str, subject: Subject, headers: Mapping[str, str]) -> dict[str, Any]:
        """A complete small JSON object; raises by status."""
        return json_object(self.get(url, subject, headers)[0], subject)

    def read(
        self, url: str, subject: Subject, headers: Mapping[str, str], offset: int
    ) -> Generator[bytes, None, None]:
        """A file's bytes from an offset on."""
        ranged = {**headers, "Range": f"bytes={offset}-"} if offset else dict(headers)
        with self.open(url, subject, ranged) as response:
            raise_for_status(response, url, subject)
            skip = _bytes_before(response, offset, subject)
            # Chunks as they arrive: a chunk that is still being collected is lost if the connection breaks.
            for chunk in response.iter_raw():
                if skip < len(chunk):
                    yield chunk[skip:] if skip else chunk
                skip = max(0, skip - len(chunk))


def raise_for_status(response: httpx2.Response, url: str, subject: Subject) -> None:
    """Raise AccessDeniedError, ModelNotFoundError or DownloadError unless the request succeeded."""
    status, host = response.status_code, response.url.host
    if status in (200, 206):
        return
    code = response.headers.get("X-Error-Code", "")
    said = f"{status} {code}" if _ERROR_CODE.fullmatch(code) else str(status)
    if status in (401, 403) and host == httpx2.URL(url).host:
        raise AccessDeniedError(f"{host} does not give {subject.what} ({said}). {subject.if_denied}")
    if status in (404, 410):
        raise ModelNotFoundError(f"{host} does not have {subject.what} ({said}). {subject.if_missing}")
    raise DownloadError(
        f"{host} answered {said} when asked for {subject.what}. It is tried again; if it stays, ask who "
        "runs it.",
        retry_after=_retry_after(response.headers.get("Retry-After", "")),
    )


def read_bounded(response: httpx2.Response, subject: Subject) -> bytes:
    """A body of limited size."""
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > _MAX_JSON_BYTES:
            raise DownloadError(
                f"{response.url.host} describes {subject.what} in more bytes than is believable."
            )
    return bytes(body)


def json_object(body: bytes, subject: Subject) -> dict[str, Any]:
    """The body as one JSON object."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DownloadError(
            f"What describes {subject.what} is no JSON object. Check the endpoint and the proxy."
        )
    return document


def is_loopback(netloc: str) -> bool:
    """Whether `host` or `host:port` is this machine, to which plain HTTP is safe."""
    host = httpx2.URL(f"http://{netloc}").host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_downgrade(response: httpx2.Response) -> None:
    target = response.headers.get("Location", "")
    if response.request.url.scheme == "https" and target.lower().startswith("http:"):
        raise DownloadError(f"{response.request.url.host} redirects to plain HTTP, which is refused.")


def _bytes_before(response: httpx2.Response, offset: int, subject: Subject) -> int:
    """How many bytes of the body precede the offset: all of them if the server ignores ranges."""
    if response.status_code == 200:
        return offset
    matched = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if matched is None or int(matched[1]) != offset:
        raise DownloadError(f"{response.url.host} sent another part of {subject.what} than it was asked for.")
    return 0


def _retry_after(text: str) -> float:
    return min(float(text), _MAX_RETRY_SECONDS) if text.isascii() and text.isdigit() else 0.0


def _cause(error: Exception) -> str:
    """The kind of error in words. Its own text may contain a URL or a proxy's password."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted ({cause.verify_message}); set SSL_CERT_FILE to a CA bundle"
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx2.ProxyError):
        return "the proxy refuses; check HTTPS_PROXY and NO_PROXY"
    if isinstance(error, httpx2.ConnectError):
        return "no connection; check the name, the network, HTTPS_PROXY and NO_PROXY"
    if isinstance(error, httpx2.TooManyRedirects):
        return f"more than {_MAX_REDIRECTS} redirects"
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return "it is no address that can be fetched"
    return f"the connection broke ({type(error).__name__})"
