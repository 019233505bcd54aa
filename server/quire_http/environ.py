"""Settings of our servers from QUIRE_* variables: texts, numbers and switches, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Mapping


class SettingsError(Exception):
    """A variable is missing, or its value cannot be used."""


class EnvironReader:
    """Variables by their names without the prefix."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str, default: str) -> str:
        """A text; an empty one is none."""
        return self._environ.get(f"QUIRE_{name}", "").strip() or default

    def switch(self, name: str, default: bool) -> bool:
        """True or false. Raises SettingsError."""
        text = self.text(name, "true" if default else "false").lower()
        if text not in ("true", "false"):
            raise SettingsError(f"QUIRE_{name}={text!r}: use true or false")
        return text == "true"

    def number(self, name: str, default: float, most: float = math.inf) -> float:
        """A number that is not negative. Raises SettingsError."""
        text = self.text(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise SettingsError(f"QUIRE_{name}={text!r}: use a number from 0 to {most:g}")
        return value
