"""Command-line flags, environment variables and help texts from a frozen dataclass of settings.

The variable of `--max-num-seqs` is `QUIRE_MAX_NUM_SEQS`; the flag takes precedence. Knows no particular
setting except `model`, the positional argument; imports nothing heavy.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from quire_server.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ENV_PREFIX = "QUIRE_"

Parser = Callable[[str], Any]


def integer(low: int, high: int = 2**53) -> Parser:
    """An integer between two bounds."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return parse


def seconds(low: float) -> Parser:
    """A duration in seconds, at least `low`."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= 10**7:
            raise ValueError(f"must be between {low:g} and 10000000 seconds")
        return value

    return parse


def number(low: float, high: float) -> Parser:
    """A number between two bounds."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low:g} and {high:g}")
        return value

    return parse


def one_of(*choices: str) -> Parser:
    """One of some fixed values."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def boolean(text: str) -> bool:
    """true or false."""
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise ValueError("must be names separated by commas")
    return found


def nonempty(text: str) -> str:
    """Any text that is not empty."""
    if not text:
        raise ValueError("must not be empty")
    return text


def path(text: str) -> Path:
    """A path that is not empty (which would be the current directory)."""
    return Path(nonempty(text))


def addresses(text: str) -> tuple[tuple[str, int], ...]:
    """One or more of HOST:PORT, separated by commas; a host of colons is in brackets."""
    found = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("must be like HOST:PORT, separated by commas")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


def url(text: str) -> str:
    """The address of an HTTP server, without a query."""
    parts = urlsplit(text)
    try:
        is_sound = parts.port is None or parts.port > 0
    except ValueError:  # the port is not a number
        is_sound = False
    is_plain = bool(parts.hostname) and not (parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not (is_sound and is_plain):
        raise ValueError("must be like http://HOST:PORT")
    return text


def setting(default: Any, parse: Parser, about: str) -> Any:
    """A field of a settings dataclass: its default, how its text is read, and its help."""
    return field(default=default, metadata={"parse": parse, "help": about})


def read(
    settings: type[DataclassInstance],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    other_variables: Collection[str],
) -> dict[str, Any]:
    """The values that are set, by field. Raises ConfigError, also for unknown QUIRE_* variables."""
    flags = vars(build_parser(settings).parse_args(argv))
    fields = [one for one in dataclasses.fields(settings) if one.name != "model"]
    known = {ENV_PREFIX + one.name.upper() for one in fields}
    _refuse_unknown_variables(environ, known.union(other_variables))
    values: dict[str, Any] = {"model": Path(flags["model"])}
    for one in fields:
        variable = ENV_PREFIX + one.name.upper()
        if flags[one.name] is not None:
            values[one.name] = _parse(_flag(one.name), one, flags[one.name])
        elif variable in environ:
            values[one.name] = _parse(variable, one, environ[variable])
    return values


def build_parser(settings: type[DataclassInstance]) -> argparse.ArgumentParser:
    """The argument parser. Values stay strings, so that flags and variables are parsed by the same code."""
    parser = _ArgumentParser(prog="quire-server serve", allow_abbrev=False, description="Serve one model.")
    parser.add_argument("model", metavar="MODEL", help="directory of the model")
    for setting in dataclasses.fields(settings):
        if setting.name == "model":
            continue
        about = f"{setting.metadata['help']} [{ENV_PREFIX}{setting.name.upper()}]"
        if setting.default not in (None, ()):
            about += f" (default: {str(setting.default).lower() if _is_switch(setting) else setting.default})"
        about = about.replace("%", "%%")  # argparse formats it
        if _is_switch(setting):
            on, off = _flag(setting.name), "--no-" + _flag(setting.name)[2:]
            parser.add_argument(on, dest=setting.name, action="store_const", const="true", help=about)
            parser.add_argument(off, dest=setting.name, action="store_const", const="false")
        else:
            parser.add_argument(_flag(setting.name), dest=setting.name, help=about)
    return parser


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise usage errors as ConfigError, like all other errors."""
        raise ConfigError(f"{message} (see quire-server serve --help)")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_switch(setting: dataclasses.Field[Any]) -> bool:
    return isinstance(setting.default, bool)


def _parse(source: str, setting: dataclasses.Field[Any], text: str) -> Any:
    try:
        return setting.metadata["parse"](text)
    except ValueError as error:
        why = str(error) if str(error).startswith("must") else "must be a number"
        raise ConfigError(f"{source}={text!r}: {why}") from None


def _refuse_unknown_variables(environ: Mapping[str, str], known: set[str]) -> None:
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(
                f"unknown environment variable {name}: remove it, or see quire-server serve --help"
            )
