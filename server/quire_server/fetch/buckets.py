"""A model as objects with a common prefix, in S3 (or a compatible store) or Google Cloud Storage, by fsspec.

Credentials and endpoints are those of the SDKs: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, web identity;
GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST, workload identity. Without credentials a bucket is read
only if that was asked for: a misconfigured identity must not pass for a public bucket. The text of SDK errors
is not shown, because some contain request signatures.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions
import google.auth
import google.auth.exceptions
import s3fs
from fsspec import AbstractFileSystem
from gcsfs.core import GCSFileSystem  # gcsfs's default tries gRPC first, which few networks allow
from gcsfs.retry import HttpError

from quire_server.errors import AccessDeniedError, DownloadError, ModelNotFoundError
from quire_server.fetch.source import Bucket, Check, Listing, RemoteFile

_BLOCK_BYTES = 16 << 20
_READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.TokenRetrievalError,
    google.auth.exceptions.GoogleAuthError,
)
_FAILED = (OSError, aiohttp.ClientError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
_VERSIONS = ("generation", "ETag", "LastModified")
T = TypeVar("T")


class BucketClient:
    """A ``SourceClient``."""

    def __init__(
        self, bucket: Bucket, environ: Mapping[str, str], stall_seconds: float, *, anonymous: bool
    ) -> None:
        self._bucket = bucket
        open_store = _open_s3 if bucket.scheme == "s3" else _open_gcs
        self._open = functools.partial(open_store, environ, stall_seconds, anonymous)

    @functools.cached_property
    def _files(self) -> AbstractFileSystem:
        return self._call(self._open)

    def list_files(self, revision: str) -> Listing:
        """The objects directly below the prefix. Buckets have no revisions."""
        del revision
        entries = self._call(lambda: self._files.ls(self._bucket.path, detail=True, refresh=True))
        start = len(self._bucket.path) + 1
        return Listing(
            "",
            tuple(_file(entry, str(entry["name"])[start:]) for entry in entries if entry["type"] == "file"),
        )

    def read(self, file: RemoteFile, offset: int) -> Generator[bytes, None, None]:
        """One object, in blocks."""
        for begin in range(offset, file.size, _BLOCK_BYTES):
            end = min(begin + _BLOCK_BYTES, file.size)
            yield self._call(functools.partial(self._files.cat_file, file.place, start=begin, end=end))

    def close(self) -> None:
        """Nothing to do: connections belong to fsspec's own thread and end with the process."""

    def _call(self, work: Callable[[], T]) -> T:
        where = f"{self._bucket.scheme}://{self._bucket.path}"
        try:
            return work()
        except (PermissionError, *_NO_CREDENTIALS):
            raise self._denied(where) from None
        except FileNotFoundError:
            raise ModelNotFoundError(
                f"There is nothing at {where}. Check the bucket and the prefix."
            ) from None
        except HttpError as error:
            if str(error.code) in ("401", "403"):
                raise self._denied(where) from None
            raise DownloadError(f"The store of {where} answered {int(error.code or 0)}.") from None
        except _FAILED as error:
            raise DownloadError(
                f"{where} cannot be read ({type(error).__name__}). Check the endpoint, the network and "
                "the proxy."
            ) from None

    def _denied(self, where: str) -> AccessDeniedError:
        needed = (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role that may list the bucket and get its "
            "objects"
            if self._bucket.scheme == "s3"
            else "GOOGLE_APPLICATION_CREDENTIALS, or a workload identity that may "
            "list the bucket and get its objects"
        )
        return AccessDeniedError(
            f"{where} is refused to these credentials, or to none. Give {needed}, or --anonymous."
        )


def _open_s3(environ: Mapping[str, str], stall_seconds: float, anonymous: bool) -> AbstractFileSystem:
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    config: dict[str, Any] = {
        "connect_timeout": min(15.0, stall_seconds),
        "read_timeout": stall_seconds,
        "retries": {"total_max_attempts": 1},
    }
    if endpoint:  # self-hosted stores rarely have a host name per bucket
        config["s3"] = {"addressing_style": "path"}
    files = s3fs.S3FileSystem(
        anon=anonymous, endpoint_url=endpoint, config_kwargs=config, skip_instance_cache=True
    )
    files.retries = 1  # ``transfer`` retries
    return files


def _open_gcs(environ: Mapping[str, str], stall_seconds: float, anonymous: bool) -> AbstractFileSystem:
    token: Any = "anon"
    if not anonymous and not environ.get("STORAGE_EMULATOR_HOST"):
        token, _ = google.auth.default(scopes=[_READ_ONLY])
    return GCSFileSystem(
        token=token,
        access="read_only",
        timeout=stall_seconds,
        session_kwargs={"trust_env": True},
        skip_instance_cache=True,
    )


def _file(entry: Mapping[str, Any], name: str) -> RemoteFile:
    """Google Cloud Storage gives the MD5 of objects that are not composed; an ETag of S3 need not be one."""
    md5 = entry.get("md5Hash")
    version = next((str(entry[key]) for key in _VERSIONS if entry.get(key)), "")
    check = Check("md5", _hex(md5)) if isinstance(md5, str) else None
    return RemoteFile(name, int(entry["size"]), check, version, str(entry["name"]))


def _hex(base64_text: str) -> str:
    return base64.b64decode(base64_text).hex()
