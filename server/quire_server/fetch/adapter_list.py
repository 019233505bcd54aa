"""The list of LoRA adapters that ``quire-server fetch-adapters`` follows, parsed. Pure.

The list gives adapters and nothing else: names and paths do not lead to other places, the environment of a
download is an allow-list, and credentials are named by files, so that the list has none. An entry that is
wrong is refused with a sentence, and the others are not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.fetch import source
from quire_server.model_dir.adapter_layout import is_adapter_name
from quire_server.model_dir.files import parse_json_object

MAX_LIST_BYTES = 1 << 20  # of a ConfigMap
MAX_ENTRIES = 256  # as many as an engine keeps
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
CREDENTIALS = frozenset({"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
#: What an entry may set. Many other variables make a library load code, or read a file.
VARIABLES = frozenset({
    "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    "AWS_REGION", "DOCKER_CONFIG", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "HF_ENDPOINT",
    "HF_TOKEN_PATH", "SSL_CERT_FILE", "STORAGE_EMULATOR_HOST",
    *_PROXIES, *(name.lower() for name in _PROXIES),
})  # fmt: skip
_KEYS = frozenset({"name", "source", "path", "anonymous", "environment", "files"})
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]{1,4096}")


@dataclass(frozen=True, slots=True)
class Entry:
    """An adapter to fetch. ``source``: as for ``quire-server fetch``. ``environment``: variables by name;
    ``files``: the files whose content are variables, by name.
    """

    name: str
    source: str
    anonymous: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Another one where anything of the entry is: then its adapter is fetched anew."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that cannot be fetched as it is written, and why. ``name`` is what to call it."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class AdapterList:
    """What is to be there."""

    entries: tuple[Entry, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def parse(data: bytes, claims: PurePosixPath, more_variables: Collection[str] = ()) -> AdapterList:
    """The list in a file. ``claims``: below it lies every ``path``. ``more_variables``: that entries may set.
    Raises ConfigError where no entry can be made out.
    """
    allowed = VARIABLES | CREDENTIALS | set(more_variables)
    if len(data) > MAX_LIST_BYTES:
        raise ConfigError(f"The list has more than {MAX_LIST_BYTES} bytes. Make it shorter.")
    try:
        items = parse_json_object(data, "The list").get("adapters")
    except ModelCorruptError as error:
        what = str(error).partition(". ")[0]  # without the advice for models
        raise ConfigError(f"{what}. Write the list again.") from None
    if not isinstance(items, list) or len(items) > MAX_ENTRIES:
        raise ConfigError(f"The list must be an object with 'adapters', a list of up to {MAX_ENTRIES}.")
    entries: list[Entry] = []
    refusals: list[Refusal] = []
    taken: set[str] = set()
    for index, item in enumerate(items):
        name = item.get("name") if isinstance(item, dict) else None
        name = name if isinstance(name, str) and is_adapter_name(name) else ""
        try:
            entries.append(_entry(item, name, claims, allowed, is_taken=name in taken))
        except ConfigError as error:
            shown = name if name and name not in taken else f"adapters[{index}]"
            refusals.append(Refusal(shown, str(error)))
        taken.add(name)
    return AdapterList(tuple(entries), tuple(refusals))


def _entry(item: Any, name: str, claims: PurePosixPath, allowed: frozenset[str], *, is_taken: bool) -> Entry:
    """``name``: the entry's, empty if it is none of an adapter."""
    if not isinstance(item, dict):
        raise ConfigError("The entry is no object. Write name, and source or path.")
    if not name:
        raise ConfigError(
            "name must have letters, digits, '-', '.' and '_', up to 253, and begin and end with a letter or "
            "a digit."
        )
    if is_taken:
        raise ConfigError(f"name is {name}, and so is an earlier one's. Choose another one.")
    if unknown := sorted(item.keys() - _KEYS):
        raise ConfigError(f"{unknown[0][:60]!r} is not known. Known are {', '.join(sorted(_KEYS))}.")
    if type(anonymous := item.get("anonymous", False)) is not bool:
        raise ConfigError("anonymous must be true or false.")
    environment, files = _environment(item, allowed), _files(item, allowed)
    return Entry(name, _source(item, claims), anonymous, environment, files)


def _source(item: Mapping[str, Any], claims: PurePosixPath) -> str:
    url, path = item.get("source"), item.get("path")
    if isinstance(url, str) and path is None:
        if isinstance(source.parse(url), source.LocalDirectory):
            raise ConfigError("source must not be a directory: write path in place of it.")
        return url
    if isinstance(path, str) and url is None:
        where = PurePosixPath(path)
        if not _PRINTABLE.fullmatch(path) or ".." in where.parts or claims not in where.parents:
            raise ConfigError(f"path must be a directory below {claims}, without '..'.")
        return f"file://{quote(str(where))}"
    raise ConfigError("Write source, such as hf://org/name@revision, or path, and not both.")


def _environment(item: Mapping[str, Any], allowed: frozenset[str]) -> dict[str, str]:
    found = _texts(item, "environment", allowed)
    if secret := sorted(found.keys() & CREDENTIALS):
        raise ConfigError(f"environment.{secret[0]} is a credential: name a file that holds it, in files.")
    return found


def _files(item: Mapping[str, Any], allowed: frozenset[str]) -> dict[str, str]:
    found = _texts(item, "files", allowed)
    if wrong := sorted(name for name, path in found.items() if not path.startswith("/")):
        raise ConfigError(f"files.{wrong[0]} must be the absolute path of a file.")
    return found


def _texts(item: Mapping[str, Any], field: str, allowed: frozenset[str]) -> dict[str, str]:
    found = item.get(field, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{field} must be an object of texts.")
    for name, text in found.items():
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            raise ConfigError(
                f"{field}.{name[:60]} is no variable of a download. Drop it; known are {known}."
            )
        if not isinstance(text, str) or not _PRINTABLE.fullmatch(text):
            raise ConfigError(f"{field}.{name} must be a text of one line, with up to 4096 characters.")
    return dict(found)
