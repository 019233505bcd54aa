"""What the engine finds out once, for /statusz: the configuration with which it serves, the first answer of
the canary, and where the ranks of its model run.

Settings leave context, dtype and quantisation open, and the memory and the CPU decide, so only the loaded
engine knows them. The operator keeps the canary's first answer of the first ready replica, and other replicas
compare theirs with it. The engine writes each of them into a file of the run directory; the health process
reads it for each request. Stdlib only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Document = Mapping[str, object]

_EFFECTIVE_CONFIG = "effective-config.json"
_CANARY = "canary.json"
_ADAPTERS = "adapters.json"
_HOSTS = "hosts.json"


@dataclass(frozen=True)
class EffectiveConfig:
    """`wanted_model_len`: the context that was asked for, else the model's own. `inexact_defaults`: settings
    left to their defaults that make answers less exact than the model's files would. `native_kernels`: the
    instruction set of the CPU kernels that run, none where torch computes; empty on a GPU.
    """

    max_model_len: int
    wanted_model_len: int
    dtype: str
    quantization: str
    inexact_defaults: tuple[str, ...] = ()
    native_kernels: str = ""


def write_effective_config(run_dir: Path, effective: EffectiveConfig) -> None:
    """Called once, when the model is loaded."""
    document = {
        "maxModelLen": effective.max_model_len,
        "wantedModelLen": effective.wanted_model_len,
        "dtype": effective.dtype,
        "quantization": effective.quantization,
        "inexactDefaults": effective.inexact_defaults,
        **({"nativeKernels": effective.native_kernels} if effective.native_kernels else {}),
    }
    _write(run_dir / _EFFECTIVE_CONFIG, document)


def write_canary(run_dir: Path, fingerprint: str, tokens: Sequence[int]) -> None:
    """Called once, when the canary has run. `fingerprint`: of all that its answer depends on."""
    _write(run_dir / _CANARY, {"fingerprint": fingerprint, "tokens": list(tokens)})


#: The state of an adapter that was dropped, and whose files may still be there.
UNLOADED = "Unloaded"


def write_adapters(
    run_dir: Path, states: Sequence[Mapping[str, object]], unloaded: Sequence[str] = ()
) -> None:
    """Called when any LoRA adapter has changed. ``states``: of all of them. One that requests may name is
    Ready, also while another content of it is loaded. ``unloaded``: names that were dropped.
    """
    empty = {"state": UNLOADED, "reason": "", "digest": "", "rank": 0, "bytes": 0}
    adapters: list[Document] = [
        {
            "name": state["name"],
            "state": "Ready" if state["is_ready"] else "Loading" if state["is_loading"] else "Failed",
            "reason": state["reason"],
            "digest": state["digest"],
            "rank": state["rank"],
            "bytes": state["size"],
        }
        for state in states
    ]
    adapters += [{"name": name, **empty} for name in unloaded]
    _write(run_dir / _ADAPTERS, {"adapters": adapters})


def read_adapters(run_dir: Path) -> list[Document]:
    """All LoRA adapters, with the reasons of those that could not be loaded."""
    adapters = (_read(run_dir / _ADAPTERS) or {"adapters": []})["adapters"]
    assert isinstance(adapters, list)
    return adapters


def write_hosts(run_dir: Path, hosts: Mapping[int, str]) -> None:
    """Called when another rank has loaded its part. ``hosts``: by rank, of those that have."""
    _write(run_dir / _HOSTS, {str(rank): host for rank, host in hosts.items()})


def read_hosts(run_dir: Path) -> Mapping[int, str]:
    """By rank, of those that have loaded their part; empty where rank 0 runs on another node."""
    return {int(rank): str(host) for rank, host in (_read(run_dir / _HOSTS) or {}).items()}


def read_effective_config(run_dir: Path) -> Document | None:
    """None while the model loads."""
    return _read(run_dir / _EFFECTIVE_CONFIG)


def read_canary(run_dir: Path) -> Document | None:
    """None until the canary has run."""
    return _read(run_dir / _CANARY)


def _write(path: Path, document: Document) -> None:
    """Write the file, so that a reader sees all of it or none."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(document))
    new.replace(path)


def _read(path: Path) -> Document | None:
    try:
        document: Document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return document
