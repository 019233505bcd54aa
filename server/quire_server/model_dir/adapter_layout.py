"""What a directory of LoRA adapters looks like: their names, and the files of one in PEFT's layout.

Knows nothing of the meaning of the files. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Weights that PEFT wrote before it wrote safetensors; never read.
PICKLED = "adapter_model.bin"
#: In a directory of adapters: what `quire-server fetch-adapters` says of each one, as NAME.json.
STATE_FOLDER = ".state"

_NAME = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,251}[A-Za-z0-9])?")


def is_adapter_name(name: str, reserved: Collection[str] = ()) -> bool:
    """Whether an adapter may be called so. ``reserved``: names of the model itself."""
    return _NAME.fullmatch(name) is not None and name not in reserved
