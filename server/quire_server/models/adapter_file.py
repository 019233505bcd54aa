"""Reads a LoRA adapter in PEFT's layout: adapter_config.json and adapter_model.safetensors.

What would be computed differently from PEFT is refused by its name. As a model's directory this one is not
trusted: every size is checked before memory is taken, and pickles are not read.
"""

import contextlib
import hashlib
import json
import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.model_dir.adapter_layout import CONFIG, PICKLED, WEIGHTS
from quire_server.model_dir.files import ModelFiles
from quire_server.models import weights

MAX_RANK = 64
_MAX_ALPHA = 1e6
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
#: Entries that change nothing in what is computed, or that the tensors say as well.
_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "lora_alpha", "lora_dropout", "megatron_config",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
})  # fmt: skip
#: Ways to begin a training that change the model's own weights: what is saved does not fit the model.
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq")
_TARGETS = "the matrices of attention (q, k, v, o) and of dense feed-forward blocks (gate, up, down)"


class HostRoom:
    """The host's memory for adapters, taken before one is read and given back when nothing refers to it any
    more. Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Raises ConfigError where so many bytes are not left."""
        with self._lock:
            if size > (left := self.limit - self._taken):
                raise ConfigError(
                    f"The adapter takes {_mib(size)} of the host's memory, and {_mib(max(0, left))} of the "
                    f"{_mib(self.limit)} for adapters are left: drop others, keep to lower ranks "
                    "(engine.maxAdapterRank), or raise resources.memory."
                )
            self._taken += size

    def give_back(self, size: int) -> None:
        """What was taken is free."""
        with self._lock:
            self._taken -= size


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterFile:
    """A checked adapter. ``factors``: by the name of the matrix in the model, A [rank, in] and B [out, rank],
    B multiplied by the scaling. ``digest``: of the content.
    """

    rank: int
    factors: Mapping[str, tuple[Tensor, Tensor]]
    digest: str

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(a.nbytes + b.nbytes for a, b in self.factors.values())


def read(
    directory: Path,
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
    dtype: torch.dtype,
    room: HostRoom,
) -> AdapterFile:
    """Read an adapter for a model whose matrices have these shapes (out, in). Its memory is taken from
    ``room``, before it is read, by what the file's header says. Raises ConfigError, ModelCorruptError or
    ModelNotFoundError.
    """
    files = _open(directory)
    config = files.read_json(CONFIG)
    rank, scaling = _checked(config)
    if rank > max_rank:
        raise ConfigError(
            f"{CONFIG}: r is {rank}, and this server takes up to {max_rank}: raise --max-adapter-rank "
            f"(engine.maxAdapterRank), at most to {MAX_RANK}."
        )
    shard = weights.inspect_file(files, WEIGHTS)
    tensors = {tensor.name: tensor.shape for tensor in shard.tensors}
    expected = _expected(tensors, shapes, rank)
    size = sum(map(math.prod, expected.values())) * dtype.itemsize
    room.take(size)
    with contextlib.ExitStack() as failed:
        failed.callback(room.give_back, size)
        targets = {name: torch.empty(shape) for name, shape in expected.items()}
        weights.read(files, (shard,), targets, lambda loaded, total: None)
        file = _converted(targets, rank, scaling, dtype)
        weakref.finalize(file, failed.pop_all().close)
    return file


def _converted(targets: dict[str, Tensor], rank: int, scaling: float, dtype: torch.dtype) -> AdapterFile:
    """The adapter of its tensors, which are taken out one by one: no two copies are there whole."""
    digest = hashlib.sha256(json.dumps([rank, scaling]).encode())
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(name for name in targets if name.endswith(_A)):
        a, b = targets.pop(name), targets.pop(name.removesuffix(_A) + _B)
        for one in (name.encode(), a.numpy().data, b.numpy().data):
            digest.update(one)
        a, b = a.to(dtype), (b * scaling).to(dtype)
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            raise ModelCorruptError(
                f"{name} or its lora_B, which is multiplied by the scaling, holds values that are not finite "
                f"numbers in {str(dtype).removeprefix('torch.')}."
            )
        factors[name.removesuffix(_A).removeprefix(_PREFIX)] = (a, b)
    return AdapterFile(rank, factors, digest.hexdigest())


def _open(directory: Path) -> ModelFiles:
    files = ModelFiles(directory, {})
    if not files.exists(CONFIG):
        raise ModelNotFoundError(f"{directory.name} has no {CONFIG}: it is no adapter in PEFT's layout.")
    if not files.exists(WEIGHTS):
        if files.exists(PICKLED):
            raise ConfigError(
                f"The adapter has {PICKLED}, a pickle, which can run code when read: save it as safetensors."
            )
        raise ModelNotFoundError(f"{directory.name} has no {WEIGHTS}.")
    return files


def _checked(config: Mapping[str, Any]) -> tuple[int, float]:
    """(rank, scaling) of a configuration that asks for nothing else than LoRA."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{CONFIG}: peft_type is {_shown(config.get('peft_type'))}; supported: LORA.")
    refused = {
        "bias": config.get("bias", "none") != "none",
        **{
            name: bool(config.get(name))
            for name in ("alpha_pattern", "fan_in_fan_out", "modules_to_save", "rank_pattern", "use_dora")
        },
        "init_lora_weights": str(config.get("init_lora_weights", "")).lower().startswith(_CHANGES_MODEL),
        **{name: bool(value) for name, value in config.items() if name not in _HARMLESS},
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{CONFIG}: {name[:60]} is {_shown(config.get(name))}, which is not supported: train the "
                "adapter without it."
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 0 < rank <= MAX_RANK:
        raise ConfigError(f"{CONFIG}: r is {_shown(rank)}; supported: 1 to {MAX_RANK}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
        raise ConfigError(
            f"{CONFIG}: lora_alpha is {_shown(alpha)}; supported: numbers up to {_MAX_ALPHA:.0f}."
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank)


def _expected(
    tensors: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, int]], rank: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's tensors. Raises where one is not LoRA's, or fits nothing in the model."""
    expected: dict[str, tuple[int, ...]] = {}
    for name in tensors:
        suffix = next((one for one in (_A, _B) if name.endswith(one)), "")
        matrix = name.removesuffix(suffix).removeprefix(_PREFIX)
        if not suffix or not name.startswith(_PREFIX):
            raise ConfigError(
                f"{WEIGHTS}: {_shown(name)} is not supported: adapters may have lora_A and lora_B of "
                f"{_TARGETS}, not of embeddings or the head, and no other tensors."
            )
        if matrix not in shapes:
            raise ConfigError(
                f"{WEIGHTS}: {_shown(matrix)} is no matrix of this model that an adapter may target; these "
                f"are {_TARGETS}."
            )
        out_size, in_size = shapes[matrix]
        expected[name] = (rank, in_size) if suffix == _A else (out_size, rank)
        if tensors[name] != expected[name]:
            raise ConfigError(
                f"{WEIGHTS}: {name} has shape {list(tensors[name])}, and the model and r ask for "
                f"{list(expected[name])}: the adapter is of another model."
            )
        other = _PREFIX + matrix + (_B if suffix == _A else _A)
        if other not in tensors:
            raise ModelCorruptError(f"{WEIGHTS}: there is {name} and no {other}.")
    if not expected:
        raise ModelCorruptError(f"{WEIGHTS} has no tensors.")
    return expected


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]
