"""The names that LoRA adapters may have."""

from __future__ import annotations

import re
from collections.abc import Collection

_NAME = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,251}[A-Za-z0-9])?")


def is_adapter_name(name: str, reserved: Collection[str] = ()) -> bool:
    """Whether an adapter may be called so. ``reserved``: names of the model itself."""
    return _NAME.fullmatch(name) is not None and name not in reserved
