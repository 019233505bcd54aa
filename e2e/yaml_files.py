"""YAML by libyaml's safe loader, in a tenth of the time of Python's: each process of a test run reads the
CRDs, for which that takes a second.
"""

from __future__ import annotations

from typing import Any

import yaml


def load_all(text: str | bytes) -> list[Any]:
    """The documents of the text, None for an empty one."""
    loader: Any = yaml.CSafeLoader(text)
    found = []
    while loader.check_data():
        found.append(loader.get_data())
    return found


def load(text: str | bytes) -> Any:
    """The only document of the text."""
    (document,) = load_all(text)
    return document
