"""The axes of the matrix of quantised checkpoints; data only, for the tests and the generated
documentation.
"""

from typing import Any

from tests.server.models import settings as config_settings

FAMILIES = config_settings.FAMILIES
FORMATS = (
    "GPTQ",
    "GPTQ, whole rows",
    "AWQ",
    "AWQ, whole rows",
    "FP8 by tensor",
    "FP8 by block",
    "int8 w8a16",
    "int8 w8a16 asymmetric",
    "int4 w4a16 asymmetric",
    "fp8 by channel",
)
KV_DTYPES = ("fp8", "int8")


def settings(family: str) -> dict[str, Any]:
    """Sizes that groups of 32 divide."""
    base = config_settings.base(family) | {"intermediate_size": 128, "num_hidden_layers": 2}
    if "layer_types" in base:
        base["layer_types"] = base["layer_types"][:2]
    return base | ({"moe_intermediate_size": 64} if "moe_intermediate_size" in base else {})


def cases() -> list[tuple[str, str, str]]:
    """(family, format, KV dtype): every family and every format with every dtype."""
    return [
        (FAMILIES[(index + shift) % len(FAMILIES)], format_, dtype)
        for shift, dtype in enumerate(KV_DTYPES)
        for index, format_ in enumerate(FORMATS)
    ]
