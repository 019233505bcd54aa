"""Publishes a model directory atomically: one fetcher at a time, a staging directory, one rename.

The staging directory's name contains the fingerprint of the source's listing, so an interrupted download is
resumed if, and only if, it belongs to the same files. An existing directory is verified against its manifest
without the network, and files that differ are fetched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire_server.errors import (
    ConfigError,
    DiskError,
    DownloadError,
    ModelCorruptError,
    QuireServerError,
)
from quire_server.fetch import selection
from quire_server.fetch.progress import Progress
from quire_server.fetch.source import CHUNK_BYTES, Listing, RemoteFile, SourceClient
from quire_server.fetch.transfer import KEPT, RetryPolicy, StoppedError, Transfer
from quire_server.model_dir.disk import disk_errors, sync
from quire_server.model_dir.files import MANIFEST_NAME, FileEntry, ModelFiles, parse_json_object

_SPARE_BYTES = 64 << 20
_SOURCE_MANIFEST = ".source-manifest.json"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in its directory. ``digest``: of all names, sizes and sha256. ``listing``: the fingerprint of
    the source's listing that it was fetched from.
    """

    source: str
    revision: str
    listing: str
    digest: str
    files: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A source's URL and where the model goes. ``is_adapter``: it is a LoRA adapter instead."""

    source: str
    to: Path
    parallel: int
    retry: RetryPolicy
    is_adapter: bool = False


def fetch(source: SourceClient, request: FetchRequest, progress: Progress) -> Fetched:
    """Fetch the model, or verify and repair the one that is there. Raises QuireServerError."""
    with disk_errors(request.to, KEPT):
        request.to.parent.mkdir(parents=True, exist_ok=True)
        with _locked(request.to, progress):
            present = _read(request)
            good: dict[str, FileEntry] = {}
            if present is not None:
                progress.begin("verifying", present.size)
                good = _intact_files(request.to, present, progress)
                if good and good.keys() == present.files.keys():
                    return present
            progress.begin("resolving")
            transfer = Transfer(source, progress, request.retry)
            listing = transfer.list_files(present.revision if present else "")
            kept = None if present is None else replace(present, files=good)
            return _fetch(transfer, request, progress, listing, kept)


def digest(files: Mapping[str, FileEntry]) -> str:
    """The digest that identifies the content."""
    text = json.dumps({name: asdict(entry) for name, entry in sorted(files.items())}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _fetch(
    transfer: Transfer, request: FetchRequest, progress: Progress, listing: Listing, kept: Fetched | None
) -> Fetched:
    candidates = selection.adapter_candidates if request.is_adapter else selection.candidates
    offered = candidates(listing)
    fingerprint = selection.fingerprint(offered.values())
    staging = request.to.parent / f".{request.to.name}.{fingerprint}.part"
    _remove_stale(request.to, keep=staging)
    staging.mkdir(exist_ok=True)
    for name in offered:
        (staging / name).parent.mkdir(exist_ok=True)
    if kept is not None and kept.listing == fingerprint:  # only files of the same listing fit
        _link_intact(request.to, staging, kept.files)
    if source_manifest := offered.pop(MANIFEST_NAME, None):
        transfer.fetch(source_manifest, staging / _SOURCE_MANIFEST)
        # Parsed with the limits of the server's own reader.
        promised = ModelFiles(staging, {}).read_json(_SOURCE_MANIFEST)
        offered = selection.with_checks(offered, _entries(promised))
    index = None
    if selection.INDEX in offered:
        transfer.fetch(offered[selection.INDEX], staging / selection.INDEX)
        index = parse_json_object((staging / selection.INDEX).read_bytes(), selection.INDEX)
    files = selection.adapter_files(offered) if request.is_adapter else selection.wanted(offered, index)
    _require_space(staging, files)
    progress.begin("downloading", sum(file.size for file in files))
    entries = _transfer_all(transfer, files, staging, request.parallel)
    # Without digests, list again: the source may have changed during the download.
    if any(file.check is None for file in files):
        now = selection.fingerprint(candidates(transfer.list_files(listing.revision)).values())
        if now != fingerprint:
            raise DownloadError("The model changed at its source while it was read. Fetch it again.")
    done = Fetched(request.source, listing.revision, fingerprint, digest(entries), entries)
    _publish(request.to, staging, done)
    return done


def _transfer_all(
    transfer: Transfer, files: tuple[RemoteFile, ...], staging: Path, parallel: int
) -> dict[str, FileEntry]:
    """Download up to ``parallel`` files at a time, largest first. The first failure stops the others."""
    failure: Exception | None = None
    entries = {}
    with ThreadPoolExecutor(parallel, thread_name_prefix="fetch") as pool:
        largest_first = sorted(files, key=lambda file: -file.size)
        running = {pool.submit(transfer.fetch, file, staging / file.name): file for file in largest_first}
        for future in as_completed(running):
            try:
                entries[running[future].name] = future.result()
            except StoppedError:
                pass  # the failure that stopped it is raised below
            except Exception as error:  # unexpected errors too: the pool waits for all threads
                failure = failure or error
                transfer.stop()
    if failure is not None:
        raise failure
    return entries


def _publish(to: Path, staging: Path, done: Fetched) -> None:
    """Write the manifest last, then rename the directory."""
    _remove_others(staging, done.files)
    document = {
        "files": {name: asdict(entry) for name, entry in sorted(done.files.items())},
        "source": done.source,
        "revision": done.revision,
        "listing": done.listing,
        "digest": done.digest,
    }
    with (staging / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staging.chmod(0o755)
    sync(staging)
    if to.exists():
        old = to.parent / f".{to.name}.old"
        os.replace(to, old)
        os.replace(staging, to)
        shutil.rmtree(old)
    else:
        os.replace(staging, to)
    sync(to.parent)


def _remove_others(staging: Path, files: Mapping[str, FileEntry]) -> None:
    """Remove what is no part of the model, and write the folder of a file that lies in one to the disk."""
    folders = {name.partition("/")[0] for name in files if "/" in name}
    for path in staging.iterdir():
        if path.name in folders:
            sync(path)
        elif path.is_dir():
            shutil.rmtree(path)
        elif path.name not in files:
            path.unlink()


def _read(request: FetchRequest) -> Fetched | None:
    """The model that is there, by its manifest; None if there is none. Raises ConfigError for a directory
    with other content.
    """
    old = request.to.parent / f".{request.to.name}.old"
    if old.exists():
        if request.to.exists():  # a previous run was killed before it removed the old directory
            shutil.rmtree(old)
        else:  # a previous run was killed between the two renames
            os.replace(old, request.to)
    if not request.to.exists():
        return None
    manifest = request.to / MANIFEST_NAME
    try:
        document = ModelFiles(request.to, {}).read_json(MANIFEST_NAME)
        if document.get("source") == request.source:
            revision, listing = str(document.get("revision", "")), str(document.get("listing", ""))
            known = str(document.get("digest", ""))
            return Fetched(request.source, revision, listing, known, _entries(document))
    except ModelCorruptError:  # the manifest is damaged, so no file can be trusted
        if manifest.is_file() and not manifest.is_symlink():
            return Fetched(request.source, "", "", "", {})
    except QuireServerError:
        pass
    if request.to.is_dir() and not any(request.to.iterdir()):
        request.to.rmdir()
        return None
    raise ConfigError(
        f"{request.to} exists and was not fetched from {request.source}. Remove it, or name another."
    )


def _intact_files(root: Path, present: Fetched, progress: Progress) -> dict[str, FileEntry]:
    """The files whose bytes match the manifest."""
    good = {}
    for name, entry in present.files.items():
        hashed, position = hashlib.sha256(), 0
        with contextlib.suppress(OSError), (root / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hashed.update(chunk)
                position += len(chunk)
                progress.at(name, position)
        if (position, hashed.hexdigest()) == (entry.size, entry.sha256):
            good[name] = entry
    return good


def _link_intact(root: Path, staging: Path, good: Mapping[str, FileEntry]) -> None:
    """Hard-link intact files into the staging directory; a server that has them open is not disturbed."""
    for name in good:
        with contextlib.suppress(OSError):  # no hard links on this volume: the file is fetched again
            os.link(root / name, staging / name)


def _require_space(staging: Path, files: tuple[RemoteFile, ...]) -> None:
    there = sum((staging / file.name).stat().st_size for file in files if (staging / file.name).exists())
    needed = max(0, sum(file.size for file in files) - there)
    free = shutil.disk_usage(staging).free
    if needed and needed + _SPARE_BYTES > free:
        raise DiskError(
            f"The model needs {needed + _SPARE_BYTES} bytes more, and its volume has {free} bytes left. "
            "Enlarge the volume "
            f"by at least {needed + _SPARE_BYTES - free} bytes."
        )


def _entries(document: Mapping[str, object]) -> dict[str, FileEntry]:
    """A manifest's files. Raises ModelCorruptError."""
    files = document.get("files")
    entries = {}
    for name, entry in files.items() if isinstance(files, dict) else ():
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(sha256, str):
            raise ModelCorruptError(
                f"{MANIFEST_NAME} has a bad entry for {str(name)[:100]!r}. Publish the model again."
            )
        entries[str(name)] = FileEntry(size, sha256)
    return entries


@contextlib.contextmanager
def _locked(to: Path, progress: Progress) -> Iterator[None]:
    """One fetcher per directory; the next one waits and finds the model complete."""
    with (to.parent / f".{to.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.begin("waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_stale(to: Path, keep: Path) -> None:
    """Remove staging directories of other listings, but none of a model with a similar name."""
    left = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{16}}\.part")
    for path in to.parent.iterdir():
        if path != keep and left.fullmatch(path.name):
            shutil.rmtree(path)
