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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_server.core.topology import Slice
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


class Matrix(NamedTuple):
    """A matrix [out, in] of the whole model that may be adapted. ``part``: the outputs (dimension 0) or the
    inputs (1) that this rank computes; None: all. ``is_here``: whether the rank has its layer.
    """

    out_size: int
    in_size: int
    part: Slice | None = None
    is_here: bool = True

    @property
    def kept(self) -> tuple[int, int]:
        """(out, in) of the rank's part."""
        if self.part is None:
            return self.out_size, self.in_size
        size = sum(each.size for each in self.part.ranges)
        return (size, self.in_size) if self.part.dimension == 0 else (self.out_size, size)


class NoRoomError(ConfigError):
    """The host has no room for an adapter."""


class HostRoom:
    """The host's memory for adapters, taken before one is read and given back when nothing refers to it any
    more. Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int, replaced: int = 0) -> None:
        """Raises NoRoomError where so many bytes are not left, with those that are ``replaced``: they are
        given back a moment later.
        """
        with self._lock:
            if size > (left := self.limit - self._taken + replaced):
                raise NoRoomError(
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
    """A checked adapter, or one rank's part of it. ``factors``: by the name of the matrix in the model,
    A [rank, in] and B [out, rank], B multiplied by the scaling. ``digest``: of the whole content.
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
    matrices: Mapping[str, Matrix],
    max_rank: int,
    dtype: torch.dtype,
    room: HostRoom,
    replaced: int = 0,
) -> AdapterFile:
    """Read an adapter of a model with these matrices, and keep the parts that this rank computes with. Their
    memory is taken from ``room``, before they are read, by what the file's header says; ``replaced``: bytes
    of it that are free once this is there. Raises ConfigError, ModelCorruptError or ModelNotFoundError.
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
    shapes = {tensor.name: tensor.shape for tensor in shard.tensors}
    _check_shapes(shapes, matrices, rank)
    kept = {name: shape for name in shapes if (shape := _kept(name, matrices, rank))}
    size = sum(map(math.prod, kept.values())) * dtype.itemsize
    room.take(size, replaced)
    with contextlib.ExitStack() as failed:
        failed.callback(room.give_back, size)
        # Before the content: where the file is changed meanwhile, the next look finds another digest.
        digest = hashlib.sha256(json.dumps([rank, scaling]).encode())
        weights.update_digest(files, shard, digest.update)
        targets = {name: torch.empty(shape) for name, shape in kept.items()}
        slices = {name: part for name in kept if (part := _slice(name, matrices)) is not None}
        weights.read_slices(files, (shard,), targets, slices, lambda loaded, total: None)
        file = AdapterFile(rank, _converted(targets, scaling, dtype), digest.hexdigest())
        weakref.finalize(file, failed.pop_all().close)
    return file


def _converted(
    targets: dict[str, Tensor], scaling: float, dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors of tensors, which are taken out one by one: no two copies are there whole."""
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(name for name in targets if name.endswith(_A)):
        a, b = targets.pop(name), targets.pop(name.removesuffix(_A) + _B)
        a, b = a.to(dtype), (b * scaling).to(dtype)
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            raise ModelCorruptError(
                f"{name} or its lora_B, which is multiplied by the scaling, holds values that are not finite "
                f"numbers in {str(dtype).removeprefix('torch.')}."
            )
        factors[_matrix(name)] = (a, b)
    return factors


def _kept(name: str, matrices: Mapping[str, Matrix], rank: int) -> tuple[int, int] | None:
    """The shape of what this rank keeps of a tensor; None: nothing."""
    matrix = matrices[_matrix(name)]
    out_size, in_size = matrix.kept
    if not matrix.is_here:
        return None
    return (rank, in_size) if name.endswith(_A) else (out_size, rank)


def _slice(name: str, matrices: Mapping[str, Matrix]) -> Slice | None:
    """The part of a tensor that this rank reads: A follows the matrix's inputs, B its outputs. None: all."""
    part = matrices[_matrix(name)].part
    return part if part is not None and (part.dimension == 1) == name.endswith(_A) else None


def _matrix(name: str) -> str:
    """The matrix that a tensor of the file is for."""
    suffix = next((one for one in (_A, _B) if name.endswith(one)), "")
    return name.removesuffix(suffix).removeprefix(_PREFIX)


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
        "use_rslora": not isinstance(config.get("use_rslora"), bool | None),
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


def _check_shapes(tensors: Mapping[str, tuple[int, ...]], matrices: Mapping[str, Matrix], rank: int) -> None:
    """Raises where a tensor of the file is not LoRA's, or fits nothing in the model."""
    for name, shape in tensors.items():
        is_a, matrix = name.endswith(_A), _matrix(name)
        if not name.endswith((_A, _B)) or not name.startswith(_PREFIX):
            raise ConfigError(
                f"{WEIGHTS}: {_shown(name)} is not supported: adapters may have lora_A and lora_B of "
                f"{_TARGETS}, not of embeddings or the head, and no other tensors."
            )
        if matrix not in matrices:
            raise ConfigError(
                f"{WEIGHTS}: {_shown(matrix)} is no matrix of this model that an adapter may target; these "
                f"are {_TARGETS}."
            )
        whole = matrices[matrix]
        expected = (rank, whole.in_size) if is_a else (whole.out_size, rank)
        if shape != expected:
            raise ConfigError(
                f"{WEIGHTS}: {name} has shape {list(shape)}, and the model and r ask for "
                f"{list(expected)}: the adapter is of another model."
            )
        other = _PREFIX + matrix + (_B if is_a else _A)
        if other not in tensors:
            raise ModelCorruptError(f"{WEIGHTS}: there is {name} and no {other}.")
    if not tensors:
        raise ModelCorruptError(f"{WEIGHTS} has no tensors.")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]
