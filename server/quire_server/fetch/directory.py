"""A model directory that is there whole or not at all: one fetcher at a time, a hidden directory, one rename.

Called by `command`. The hidden directory's name holds the fingerprint of the source's listing, so that what a
killed download left is continued if, and only if, it belongs to the same files. A directory that is there is
checked against its manifest, without the network; files that differ are fetched again.
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

from quire_server.core.errors import (
    ConfigError,
    DiskError,
    DownloadError,
    ModelCorruptError,
    QuireServerError,
)
from quire_server.core.model_files import MANIFEST_NAME, FileEntry, ModelFiles, parse_json_object
from quire_server.fetch import selection
from quire_server.fetch.progress import Progress
from quire_server.fetch.remote import CHUNK_BYTES, Listing, Remote, RemoteFile
from quire_server.fetch.transfer import Patience, StoppedError, Transfer, disk_errors

_SPARE_BYTES = 64 << 20
_SOURCE_MANIFEST = ".source-manifest.json"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model as it stands in its directory. `digest`: of all names, sizes and sha256. `listing`: fingerprint
    of the source's listing that it was fetched by.
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
class Order:
    """What is wanted: a source's name and where it goes."""

    source: str
    to: Path
    parallel: int
    patience: Patience


def fetch(remote: Remote, order: Order, progress: Progress) -> Fetched:
    """Bring the model there, or find it there. Raises QuireServerError."""
    with disk_errors(order.to):
        order.to.parent.mkdir(parents=True, exist_ok=True)
        with _alone(order.to, progress):
            present = _read(order)
            good: dict[str, FileEntry] = {}
            if present is not None:
                progress.begin("verifying", present.size)
                good = _unharmed(order.to, present, progress)
                if good and good.keys() == present.files.keys():
                    return present
            progress.begin("resolving")
            transfer = Transfer(remote, progress, order.patience)
            listing = transfer.list_files(present.revision if present else "")
            kept = None if present is None else replace(present, files=good)
            return _fetch(transfer, order, progress, listing, kept)


def digest(files: Mapping[str, FileEntry]) -> str:
    """The content's name."""
    text = json.dumps({name: asdict(entry) for name, entry in sorted(files.items())}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _fetch(
    transfer: Transfer, order: Order, progress: Progress, listing: Listing, kept: Fetched | None
) -> Fetched:
    offered = selection.candidates(listing)
    fingerprint = selection.fingerprint(offered.values())
    staging = order.to.parent / f".{order.to.name}.{fingerprint}.part"
    _clear(order.to, keep=staging)
    staging.mkdir(exist_ok=True)
    if kept is not None and kept.listing == fingerprint:  # files of another state of the source do not fit
        _take_over(order.to, staging, kept.files)
    if source_manifest := offered.pop(MANIFEST_NAME, None):
        transfer.fetch(source_manifest, staging / _SOURCE_MANIFEST)
        # Read by the rules of the server's own reader.
        promised = ModelFiles(staging, {}).read_json(_SOURCE_MANIFEST)
        offered = selection.with_checks(offered, _entries(promised))
    index = None
    if selection.INDEX in offered:
        transfer.fetch(offered[selection.INDEX], staging / selection.INDEX)
        index = parse_json_object((staging / selection.INDEX).read_bytes(), selection.INDEX)
    files = selection.wanted(offered, index)
    _require_room(staging, files)
    progress.begin("downloading", sum(file.size for file in files))
    entries = _transfer_all(transfer, files, staging, order.parallel)
    # A source without digests may have changed under the reader.
    if any(file.check is None for file in files):
        now = selection.fingerprint(selection.candidates(transfer.list_files(listing.revision)).values())
        if now != fingerprint:
            raise DownloadError("The model changed at its source while it was read. Fetch it again.")
    done = Fetched(order.source, listing.revision, fingerprint, digest(entries), entries)
    _publish(order.to, staging, done)
    return done


def _transfer_all(
    transfer: Transfer, files: tuple[RemoteFile, ...], staging: Path, parallel: int
) -> dict[str, FileEntry]:
    """All at once, so many at a time, the largest first. The first failure ends the others."""
    failure: Exception | None = None
    entries = {}
    with ThreadPoolExecutor(parallel, thread_name_prefix="fetch") as pool:
        largest_first = sorted(files, key=lambda file: -file.size)
        running = {pool.submit(transfer.fetch, file, staging / file.name): file for file in largest_first}
        for future in as_completed(running):
            try:
                entries[running[future].name] = future.result()
            except StoppedError:
                pass  # the failure that stopped it is told
            except Exception as error:  # one that nobody foresaw, too: leaving waits for the others
                failure = failure or error
                transfer.stop()
    if failure is not None:
        raise failure
    return entries


def _publish(to: Path, staging: Path, done: Fetched) -> None:
    """The manifest last, then everything at once."""
    for path in staging.iterdir():
        if path.name not in done.files:
            path.unlink()
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
    _sync(staging)
    if to.exists():
        old = to.parent / f".{to.name}.old"
        os.replace(to, old)
        os.replace(staging, to)
        shutil.rmtree(old)
    else:
        os.replace(staging, to)
    _sync(to.parent)


def _read(order: Order) -> Fetched | None:
    """What is there, by its manifest; None for nothing. Raises ConfigError for somebody else's directory."""
    old = order.to.parent / f".{order.to.name}.old"
    if old.exists():
        if order.to.exists():  # killed before the old one was removed
            shutil.rmtree(old)
        else:  # killed between two renames
            os.replace(old, order.to)
    if not order.to.exists():
        return None
    manifest = order.to / MANIFEST_NAME
    try:
        document = ModelFiles(order.to, {}).read_json(MANIFEST_NAME)
        if document.get("source") == order.source:
            revision, listing = str(document.get("revision", "")), str(document.get("listing", ""))
            known = str(document.get("digest", ""))
            return Fetched(order.source, revision, listing, known, _entries(document))
    except ModelCorruptError:  # nothing says any more which files are good
        if manifest.is_file() and not manifest.is_symlink():
            return Fetched(order.source, "", "", "", {})
    except QuireServerError:
        pass
    if order.to.is_dir() and not any(order.to.iterdir()):
        order.to.rmdir()
        return None
    raise ConfigError(
        f"{order.to} exists and was not fetched from {order.source}. Remove it, or name another."
    )


def _unharmed(root: Path, present: Fetched, progress: Progress) -> dict[str, FileEntry]:
    """The files whose bytes are those of the manifest."""
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


def _take_over(root: Path, staging: Path, good: Mapping[str, FileEntry]) -> None:
    """The unharmed files of a directory that is repaired; whoever has it open keeps it."""
    for name in good:
        with contextlib.suppress(OSError):  # no links on this volume: it is fetched again
            os.link(root / name, staging / name)


def _require_room(staging: Path, files: tuple[RemoteFile, ...]) -> None:
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
    """A manifest's files; raises ModelCorruptError."""
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
def _alone(to: Path, progress: Progress) -> Iterator[None]:
    """One fetcher per directory; the next waits, and finds the work done."""
    with (to.parent / f".{to.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.begin("waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clear(to: Path, keep: Path) -> None:
    """What belongs to another state of the source, and to no model that is called alike."""
    left = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{16}}\.part")
    for path in to.parent.iterdir():
        if path != keep and left.fullmatch(path.name):
            shutil.rmtree(path)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
