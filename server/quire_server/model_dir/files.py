"""Safe reading of a model directory: plain file names, regular files, bounded sizes, checked digests.

Every model file is read through this module, so its guarantees hold everywhere: no path leads out of the
directory, with a ``quire-manifest.json`` only the files that it names are read, and no read is unbounded.
Knows nothing of the meaning of the files.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.model_dir import disk

MANIFEST_NAME = "quire-manifest.json"
MODULES = "modules.json"
SENTENCE_LENGTH = "sentence_bert_config.json"
#: The one file of a model that lies in a folder: sentence-transformers' way to name the pooling.
POOLING = "1_Pooling/config.json"
# Bytes. Real models: config.json is below 100 KB, the tokenizer_config.json of Gemma 3 has 1.2 MB.
JSON_LIMIT = 4 << 20
# Empty lists take 25 times their JSON size in memory, so the number of values is bounded as well; an object
# takes up to 800 bytes, so it counts as several. The header of a file with 100,000 tensors has 800,000
# values.
_MAX_VALUES = 1_200_000
_VALUES_PER_OBJECT = 10

_REDO = "Download or import the model again."


class Digest(Protocol):
    """The part of hashlib's interface that reading needs."""

    def update(self, data: memoryview, /) -> None: ...


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The manifest's entry of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model directory. ``manifest`` is empty when the directory has none."""

    root: Path
    manifest: dict[str, FileEntry]

    @classmethod
    def open(cls, root: Path) -> "ModelFiles":
        """Find the directory and its manifest."""
        try:
            is_there, has_config = root.is_dir(), (root / "config.json").exists()
        except PermissionError:
            raise _unreadable(root) from None
        if not is_there:
            raise ModelNotFoundError(
                f"There is no model directory at {root}. Check the path, and that the volume holds the model."
            )
        if not has_config:
            hint = (
                "import it first: quire-server import-gguf" if any(root.glob("*.gguf")) else "check the path"
            )
            raise ModelNotFoundError(f"{root} has no config.json, so it is no model directory; {hint}.")
        bare = cls(root, {})
        if not (root / MANIFEST_NAME).exists():
            return bare
        return cls(root, _manifest(bare.read_json(MANIFEST_NAME)))

    def exists(self, name: str) -> bool:
        """Whether the directory or the manifest has this file."""
        return name in self.manifest or (self.root / name).exists()

    def read(self, name: str, limit: int) -> bytes:
        """A whole small file."""
        with self.opened(name) as (file, size, digest):
            if size > limit:
                raise ModelCorruptError(
                    f"{name} has {size} bytes; more than {limit} are not believable. {_REDO}"
                )
            data = file.read(limit + 1)
            digest.update(memoryview(data))
        return data

    def read_json(self, name: str, limit: int = JSON_LIMIT) -> dict[str, Any]:
        """A small file that holds one JSON object."""
        return parse_json_object(self.read(name, limit), name)

    @contextlib.contextmanager
    def opened_unchecked(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """(file, size) without a digest check, to inspect a part of the file. To use its content, read it
        with a check. Unbuffered: of a part nothing beside it is read.
        """
        self._entry(name)
        with os.fdopen(_open_regular(self.root, name), "rb", buffering=0) as file:
            yield file, os.fstat(file.fileno()).st_size

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[BinaryIO, int, Digest]]:
        """(file, size, digest that the caller updates with every byte). The digest is checked on normal
        exit.
        """
        entry = self._entry(name)
        digest = hashlib.sha256()
        with os.fdopen(_open_regular(self.root, name), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if entry is not None and size != entry.size:
                raise ModelCorruptError(
                    f"{name} has {size} bytes, and {MANIFEST_NAME} says {entry.size}. {_REDO}"
                )
            yield file, size, digest if entry is not None else _NoDigest()
        if entry is not None and digest.hexdigest() != entry.sha256:
            raise ModelCorruptError(f"{name} does not have the sha256 that {MANIFEST_NAME} records. {_REDO}")

    def _entry(self, name: str) -> FileEntry | None:
        """The manifest's entry of a file; None where there is no manifest."""
        if self.manifest and name not in self.manifest:
            raise ModelCorruptError(
                f"{MANIFEST_NAME} does not name {name}, so nothing says that it belongs to the model. "
                f"Remove the file; or remove {MANIFEST_NAME}, and nothing is checked."
            )
        return self.manifest.get(name)


class _NoDigest:
    """Used where there is no expected digest, because hashing takes a second per GB."""

    def update(self, data: memoryview, /) -> None:
        pass


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A temporary directory to write a model to. On normal exit it is renamed to ``out``, with a manifest and
    all of it on the disk; after an error it is removed. An OSError becomes a DiskError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already. Remove it, or name another directory.")
    with disk.disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            yield staging
            write_manifest(staging)
            staging.chmod(0o755)
            disk.publish(staging, out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def write_manifest(root: Path, progress: Callable[[str], None] = lambda name: None) -> None:
    """Write a manifest with size and sha256 of every file in the directory."""
    files = {}
    for path in sorted(root.iterdir()):
        progress(path.name)
        with path.open("rb") as file:
            files[path.name] = {
                "size": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    (root / MANIFEST_NAME).write_text(json.dumps({"files": files}, indent=1) + "\n")


def is_plain_name(name: object) -> bool:
    """Whether this is a file name without a path, or the one known name in a folder."""
    return name == POOLING or (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in {".", ".."}
        and not set(name) & set("/\\\0")
    )


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse an untrusted file that must hold one JSON object. Raises ModelCorruptError.

    Duplicate keys are refused, because another program that checked the file may have used the other value.
    """
    check_values(data, name, _MAX_VALUES)
    try:
        value = json.loads(data, object_pairs_hook=functools.partial(_unique, name))
    except (ValueError, RecursionError):
        raise ModelCorruptError(f"{name} is not JSON. {_REDO}") from None
    if not isinstance(value, dict):
        raise ModelCorruptError(f"{name} holds no JSON object. {_REDO}")
    return value


def check_values(data: bytes, name: str, limit: int) -> None:
    """Raise ModelCorruptError for JSON with too many values, before it is parsed. Also counts commas in
    strings.
    """
    num_objects = data.count(b"{")
    count = num_objects + data.count(b",") + data.count(b"[")
    if max(count, num_objects * _VALUES_PER_OBJECT) > limit:
        raise ModelCorruptError(
            f"{name} has about {count} values, {num_objects} of them objects; more than {limit}, or "
            f"{limit // _VALUES_PER_OBJECT} objects, are not believable. {_REDO}"
        )


def _unique(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ModelCorruptError(f"{name} names {twice[:100]!r} twice. {_REDO}")
    return value


def _open_regular(root: Path, name: str) -> int:
    """Open a regular file in the directory, or in the blob store of the hub cache that the directory belongs
    to.
    """
    if not is_plain_name(name):
        raise ModelCorruptError(f"{name!r} is no plain file name; a model's files lie in its own directory.")
    base = root.resolve()
    path = (base / name).resolve()
    if not any(path.is_relative_to(home) for home in (base, base.parent.parent / "blobs")):
        raise ModelCorruptError(
            f"{name} is a link that leads out of the model directory. Copy the file there."
        )
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # non-blocking: it may be a pipe
    except FileNotFoundError:
        raise ModelNotFoundError(f"{name} is missing from the model directory. {_REDO}") from None
    except PermissionError:
        raise _unreadable(path) from None
    except OSError as error:
        raise ModelCorruptError(f"{name} cannot be read: {error.strerror}.") from None
    wrong = ""
    if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):  # a link came after the path was resolved
        wrong = f"{name} changed while it was opened."
    elif not stat.S_ISREG(os.fstat(descriptor).st_mode):
        wrong = f"{name} is not a regular file."
    if wrong:
        os.close(descriptor)
        raise ModelCorruptError(wrong)
    return descriptor


def _unreadable(path: Path) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{path} is not readable by user {os.getuid()}. Make the model's files readable: chmod -R a+rX."
    )


def _manifest(document: dict[str, Any]) -> dict[str, FileEntry]:
    files = document.get("files")
    if not isinstance(files, dict) or not files:
        raise ModelCorruptError(f"{MANIFEST_NAME} has no object 'files'. {_REDO}")
    entries = {}
    for name, entry in files.items():
        size = entry.get("size") if isinstance(entry, dict) else None
        sha256 = entry.get("sha256") if isinstance(entry, dict) else None
        if not is_plain_name(name) or type(size) is not int or not isinstance(sha256, str):
            raise ModelCorruptError(f"{MANIFEST_NAME} has a bad entry for {name!r}. {_REDO}")
        entries[name] = FileEntry(size, sha256)
    return entries
