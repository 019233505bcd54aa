"""The compile keys that serving launches with at the shapes of real models, as `bench.record_serving_keys`
has written them to bench/results/serving_keys.json, and the launch configs that compile them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

from quire_kernels.all_launch_configs import LAUNCH_CONFIGS
from quire_kernels.attention.split_kv_attention_triton import MAX_SPLITS
from quire_kernels.launch_config import LaunchConfig

FILE = Path(__file__).parent / "results" / "serving_keys.json"
GPUS = (80, 86, 89, 90, 100, 120)
_SPLIT = ("split_kernel", "reduce_kernel")


def committed() -> list[dict[str, Any]]:
    """The entries of the file: each a key with the models and the GPUs that meet it."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def launch_configs() -> tuple[LaunchConfig, ...]:
    """Of the committed keys; of those that differ in the number of splits alone, one split and the most."""
    return tuple(
        launch_config(found)
        for found in committed()
        if found["kernel"] not in _SPLIT or found["constants"]["SPLITS"] in (1, MAX_SPLITS)
    )


def launch_config(found: Mapping[str, Any]) -> LaunchConfig:
    """What compiles the entry's kernel as serving launches it."""
    types, aligned = found["types"], frozenset(found["aligned"])
    loose = sorted(name for name, kind in types.items() if kind.startswith("*") and name not in aligned)
    if loose:
        raise ValueError(f"{found['kernel']}: {', '.join(loose)} begin at no multiple of 16 bytes")
    return LaunchConfig(
        name_of(found), _kernel(found["kernel"]), types, found["constants"], found["warps"], found["stages"],
        found["registers"], frozenset(name for name in aligned if not types[name].startswith("*")),
        gpus=tuple(found["gpus"]),
    )  # fmt: skip


def name_of(found: Mapping[str, Any]) -> str:
    """Unlike that of any other key: types of tensors, constants, and integers that are no multiples of 16."""
    tensors = [f"{name.removesuffix('_ptr')} {kind}" for name, kind in found["types"].items() if "*" in kind]
    odd = [name for name, kind in found["types"].items() if kind == "i32" and name not in found["aligned"]]
    constants = [f"{name} {value}" for name, value in found["constants"].items() if value is not None]
    said = [*constants, *tensors, *(f"odd {name}" for name in odd)]
    return f"serving {found['kernel']}: {', '.join(said)}; {found['warps']}/{found['stages']}"


def _kernel(name: str) -> JITFunction:
    for each in LAUNCH_CONFIGS:
        if each.kernel.fn.__name__ == name:
            kernel: JITFunction = each.kernel
            return kernel
    raise ValueError(f"{name} is in no LAUNCH_CONFIGS: add its module to quire_kernels.all_launch_configs")
