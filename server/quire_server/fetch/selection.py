"""Selects the files of a source that a model needs: those that the server reads, from the source's root. Pure
functions. Of names with a slash, such as ../../etc/passwd, only the one of a pooling is ever selected. Of a
LoRA adapter's source only the two files of PEFT's layout are.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.fetch.source import Check, Listing, RemoteFile
from quire_server.model_dir import adapter_layout
from quire_server.model_dir.files import (
    MANIFEST_NAME,
    MODULES,
    POOLING,
    SENTENCE_LENGTH,
    FileEntry,
    is_plain_name,
)

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SMALL = frozenset(
    {
        "config.json",
        "generation_config.json",
        MODULES,
        POOLING,
        SENTENCE_LENGTH,
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
_SMALL_BYTES = 256 << 20
_MAX_SHARDS = 10_000
_ADAPTER = (adapter_layout.CONFIG, adapter_layout.WEIGHTS)
_MAX_ADAPTER_BYTES = 8 << 30


def candidates(listing: Listing) -> dict[str, RemoteFile]:
    """By name, every file that a model may need. Raises QuireServerError."""
    found: dict[str, RemoteFile] = {}
    for file in listing.files:
        is_small = file.name in {*_SMALL, INDEX, MANIFEST_NAME} or _is_template(file.name)
        if not is_plain_name(file.name) or not (is_small or file.name.endswith(".safetensors")):
            continue
        if file.name in found:
            raise ModelCorruptError(f"The source lists {file.name} twice. Publish the model again.")
        if is_small and file.size > _SMALL_BYTES:
            raise ModelCorruptError(
                f"The source's {file.name} has {file.size} bytes, which is not believable."
            )
        found[file.name] = file
    if "config.json" not in found:
        raise ModelNotFoundError(
            "The source has no config.json in its root, so it is no model directory. Check the name or "
            "the prefix."
        )
    if _SINGLE not in found and INDEX not in found:
        raise ConfigError(
            f"The source has neither {_SINGLE} nor {INDEX}. Use the model's safetensors release; GGUF is "
            "converted with quire-server import-gguf, pickled weights are refused."
        )
    return found


def adapter_candidates(listing: Listing) -> dict[str, RemoteFile]:
    """By name, the files of a LoRA adapter, and its manifest if there is one. Raises QuireServerError."""
    offered: dict[str, RemoteFile] = {}
    for file in listing.files:
        if file.name in offered:
            raise ModelCorruptError(f"The source lists {file.name} twice. Publish the adapter again.")
        offered[file.name] = file
    config, weights = _ADAPTER
    if config not in offered:
        raise ModelNotFoundError(
            f"The source has no {config} in its root, so it is no LoRA adapter in PEFT's layout. Check the "
            "name, the prefix or the path."
        )
    if weights not in offered and adapter_layout.PICKLED in offered:
        raise ConfigError(
            f"The source has {adapter_layout.PICKLED} and no {weights}. A pickle can run code when it is "
            "read: save the adapter as safetensors."
        )
    if weights not in offered:
        raise ModelNotFoundError(f"The source has no {weights} in its root. Publish the adapter again.")
    found = {name: offered[name] for name in (*_ADAPTER, MANIFEST_NAME) if name in offered}
    if (size := sum(file.size for file in found.values())) > _MAX_ADAPTER_BYTES:
        raise ConfigError(
            f"The source's adapter has {size} bytes; more than {_MAX_ADAPTER_BYTES} are not taken. Check the "
            "name: is it a model?"
        )
    return found


def adapter_files(files: Mapping[str, RemoteFile]) -> tuple[RemoteFile, ...]:
    """The files to download of an adapter. Raises ModelCorruptError."""
    if missing := [name for name in _ADAPTER if name not in files]:
        raise ModelCorruptError(
            f"The source's {MANIFEST_NAME} does not name {missing[0]}. Publish the adapter again."
        )
    return tuple(files[name] for name in _ADAPTER)


def fingerprint(files: Iterable[RemoteFile]) -> str:
    """A digest of the listing. An interrupted download is resumed only if it belongs to the same files."""
    facts = sorted(repr((file.name, file.size, file.version, file.check)) for file in files)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def with_checks(files: Mapping[str, RemoteFile], manifest: Mapping[str, FileEntry]) -> dict[str, RemoteFile]:
    """Add the digests of the model's own manifest to files without a sha256 from the source."""
    result = {}
    for name, file in files.items():
        entry = manifest.get(name)
        if manifest and entry is None:
            continue
        if entry is not None and entry.size != file.size:
            raise ModelCorruptError(
                f"{name} has {file.size} bytes at the source, and its {MANIFEST_NAME} says {entry.size}. "
                "Publish the model again."
            )
        if entry is not None and (file.check is None or file.check.algorithm != "sha256"):
            file = dataclasses.replace(file, check=Check("sha256", entry.sha256))
        result[name] = file
    return result


def wanted(files: Mapping[str, RemoteFile], index: Mapping[str, object] | None) -> tuple[RemoteFile, ...]:
    """The files to download: the small ones, and the weights that the index names. Raises
    ModelCorruptError.
    """
    if index is None:
        shards = {_SINGLE}
    else:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelCorruptError(f"{INDEX} has no object 'weight_map'. Publish the model again.")
        shards = {str(name) for name in weight_map.values()}
    if len(shards) > _MAX_SHARDS:
        raise ModelCorruptError(
            f"{INDEX} names {len(shards)} files; more than {_MAX_SHARDS} are not believable."
        )
    if missing := sorted(name for name in shards if name not in files or not name.endswith(".safetensors")):
        raise ModelCorruptError(f"{INDEX} names {missing[0][:100]!r}, which the source does not have.")
    templates = {name for name in files if _is_template(name)}
    names = (_SMALL | {INDEX} if index is not None else _SMALL) | templates | shards
    return tuple(files[name] for name in sorted(names & files.keys()))


def _is_template(name: str) -> bool:
    return name.startswith("chat_template") and name.endswith(".jinja")
