"""Streams safetensors files: all headers first, checked against the model's shapes, then the bytes, once and
in file order.

Files are read and not mapped: a mapped file that is truncated while it is read ends the process with SIGBUS,
and page faults are as expensive as the copy through a small buffer. Memory is allocated for a tensor only
after its header was checked, and beyond the model itself there is one buffer. The manifest's digests are
verified over the bytes that are loaded. Pickled checkpoints are refused without reading them.
"""

import itertools
import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from quire_server.core.topology import Range, Slice
from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.model_dir.files import ModelFiles, is_plain_name, parse_json_object

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Bytes: some 150 per tensor in a shard's header, 100 in an index. DeepSeek V3 has 91,000 tensors (9 MB).
_HEADER_LIMIT = _INDEX_LIMIT = 16 << 20
_MAX_SHARDS = 4096
_MAX_TENSORS = 100_000
_CHUNK = 8 << 20
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # converted on reading
_IGNORED = ("rotary_emb.inv_freq",)  # written by old converters, and derived from config.json here
_REMEDY = "Download or convert the model again."


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """A file whose header was checked: the header's length, and its tensors in file order without gaps."""

    name: str
    header_size: int
    tensors: tuple[_Tensor, ...]

    def positions(self) -> Iterator[tuple[int, _Tensor]]:
        """(offset in the file, tensor) of each tensor."""
        position = self.header_size
        for tensor in self.tensors:
            yield position, tensor
            position += tensor.size

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.header_size + sum(tensor.size for tensor in self.tensors)


def inspect(files: ModelFiles, wanted: Mapping[str, Tensor], tied: Collection[str] = ()) -> tuple[Shard, ...]:
    """Read and check all headers. The files must contain exactly the ``wanted`` tensors with their shapes and
    types (any float type for a float type); ``tied`` copies are allowed and skipped.
    """
    shards = tuple(inspect_file(files, name) for name in _shard_names(files))
    seen: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in seen:
                raise ModelCorruptError(
                    f"{shard.name}: tensor {tensor.name} is in {seen[tensor.name]} as well. {_REMEDY}"
                )
            seen[tensor.name] = shard.name
            expected = wanted.get(tensor.name)
            if expected is not None:
                _compare(shard.name, tensor, expected)
            if expected is None and tensor.name not in tied and not tensor.name.endswith(_IGNORED):
                raise ModelCorruptError(
                    f"{shard.name}: tensor {tensor.name[:100]!r} fits nothing in config.json. {_REMEDY}"
                )
    if missing := sorted(set(wanted) - set(seen)):
        raise ModelCorruptError(f"{len(missing)} tensors are in no file, {missing[0]} first. {_REMEDY}")
    return shards


def has_tensor(files: ModelFiles, name: str) -> bool:
    """Whether a file has a tensor of this name. Reads all headers."""
    return any(
        tensor.name == name for shard in _shard_names(files) for tensor in inspect_file(files, shard).tensors
    )


def _compare(shard: str, tensor: _Tensor, expected: Tensor) -> None:
    both_single = math.prod(tensor.shape) == expected.numel() == 1  # some tools write [1] for []
    if tensor.shape != tuple(expected.shape) and not both_single:
        raise ModelCorruptError(
            f"{shard}: tensor {tensor.name} has shape {list(tensor.shape)}; "
            f"config.json asks for {list(expected.shape)}. {_REMEDY}"
        )
    if tensor.dtype != expected.dtype and not {tensor.dtype, expected.dtype} <= set(_FLOATS):
        asked = "a float type" if expected.dtype in _FLOATS else str(expected.dtype).removeprefix("torch.")
        raise ModelCorruptError(
            f"{shard}: tensor {tensor.name} has dtype {str(tensor.dtype).removeprefix('torch.')}; "
            f"config.json asks for {asked}. {_REMEDY}"
        )


def read(
    files: ModelFiles,
    shards: tuple[Shard, ...],
    targets: Mapping[str, Tensor],
    on_progress: Callable[[int, int], None],
) -> None:
    """Fill the targets. ``on_progress(loaded, total)`` counts bytes of files, at every chunk."""
    total, loaded = sum(shard.size for shard in shards), 0
    buffer = bytearray(_CHUNK)
    on_progress(0, total)
    for shard in shards:
        with files.opened(shard.name) as (file, size, digest):
            _refuse_changed(shard, size)
            reader = _Reader(file, shard.name, buffer, digest.update)
            for _ in reader.chunks(shard.header_size, "the header"):
                pass
            for tensor in shard.tensors:
                for _ in _fill(reader, tensor, targets.get(tensor.name)):
                    on_progress(min(loaded + reader.position, total), total)
        loaded += shard.size
        on_progress(loaded, total)


def read_slices(
    files: ModelFiles,
    shards: tuple[Shard, ...],
    targets: Mapping[str, Tensor],
    slices: Mapping[str, Slice],
    on_progress: Callable[[int, int], None],
) -> None:
    """Fill the targets, those with a slice from it alone: no other bytes are read. ``on_progress(loaded,
    total)`` counts the bytes of tensors that are read. Digests are not checked, as in ``pick``.
    """
    wanted = [
        (shard, begin, tensor, _part(tensor, slices.get(tensor.name)))
        for shard in shards
        for begin, tensor in shard.positions()
        if tensor.name in targets
    ]
    total, loaded = sum(part.size for *_, part in wanted), 0
    buffer = bytearray(_CHUNK)
    on_progress(0, total)
    for shard, group in itertools.groupby(wanted, key=operator.itemgetter(0)):
        with files.opened_unchecked(shard.name) as (file, size):
            _refuse_changed(shard, size)
            reader = _Reader(file, shard.name, buffer, _ignore)
            for _, begin, tensor, part in group:
                for count in _fill_part(reader, begin, tensor, part, targets[tensor.name]):
                    loaded += count
                    on_progress(loaded, total)


class _Part(NamedTuple):
    """A tensor as [outer, split, inner], of which ``ranges`` of the middle dimension are read."""

    outer: int
    split: int
    inner: int  # bytes
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return self.outer * self.inner * sum(one.size for one in self.ranges)


def _part(tensor: _Tensor, wanted: Slice | None) -> _Part:
    if wanted is None:
        return _Part(1, 1, tensor.size, (Range(0, 1),))
    shape, dimension = tensor.shape, wanted.dimension
    inner = math.prod(shape[dimension + 1 :]) * tensor.dtype.itemsize
    return _Part(math.prod(shape[:dimension]), shape[dimension], inner, wanted.ranges)


def _fill_part(reader: "_Reader", begin: int, tensor: _Tensor, part: _Part, target: Tensor) -> Iterator[int]:
    """Yields the bytes read after each chunk. The target's dimension may be longer than the ranges: the rest
    is padding.
    """
    rows = target.view(part.outer, -1)
    each = tensor.dtype.itemsize
    column = 0
    for one in part.ranges:
        run = one.size * part.inner
        for row in range(part.outer if run else 0):
            filled = column
            reader.seek(begin + (row * part.split + one.start) * part.inner)
            for chunk in reader.chunks(run, f"tensor {tensor.name}"):
                count = len(chunk) // each
                rows[row, filled : filled + count].copy_(torch.frombuffer(chunk, dtype=tensor.dtype))
                filled += count
            if row % 256 == 255 or row == part.outer - 1:
                yield (row % 256 + 1) * run
        column += run // each


def verify(files: ModelFiles, shards: Iterable[Shard]) -> None:
    """Read the files whole and check their digests. Without a manifest there are none: nothing is read."""
    if not files.manifest:
        return
    buffer = bytearray(_CHUNK)
    for shard in shards:
        with files.opened(shard.name) as (file, size, digest):
            for _ in _Reader(file, shard.name, buffer, digest.update).chunks(size, "the file"):
                pass


def update_digest(files: ModelFiles, shard: Shard, update: Callable[[memoryview], None]) -> None:
    """Give a digest all bytes of a file."""
    with files.opened_unchecked(shard.name) as (file, size):
        _refuse_changed(shard, size)
        for _ in _Reader(file, shard.name, bytearray(_CHUNK), update).chunks(size, "the file"):
            pass


def pick(files: ModelFiles, shards: tuple[Shard, ...], targets: Mapping[str, Tensor]) -> None:
    """Fill these targets only, wherever they are in the files. Digests are not checked, since they are those
    of whole files: call ``read`` without targets first if the files are not trusted.
    """
    buffer = bytearray(_CHUNK)
    for shard in shards:
        with files.opened_unchecked(shard.name) as (file, size):
            _refuse_changed(shard, size)
            reader = _Reader(file, shard.name, buffer, _ignore)
            for position, tensor in shard.positions():
                if tensor.name in targets:
                    reader.seek(position)
                    for _ in _fill(reader, tensor, targets[tensor.name]):
                        pass


def _refuse_changed(shard: Shard, size: int) -> None:
    if size != shard.size:
        raise ModelCorruptError(f"{shard.name} changed while it was read. Try again.")


def _ignore(chunk: memoryview) -> None:
    """No digest is computed."""


def _fill(reader: "_Reader", tensor: _Tensor, target: Tensor | None) -> Iterator[None]:
    """Yields after each chunk. Without a target the bytes are read and dropped."""
    flat, filled = None if target is None else target.view(-1), 0
    for chunk in reader.chunks(tensor.size, f"tensor {tensor.name}"):
        count = len(chunk) // tensor.dtype.itemsize
        if flat is not None:
            flat[filled : filled + count].copy_(torch.frombuffer(chunk, dtype=tensor.dtype))
        filled += count
        yield


class _Reader:
    """Sequential chunks of a file through one buffer; each chunk is passed to the digest."""

    def __init__(
        self, file: BinaryIO, name: str, buffer: bytearray, digest: Callable[[memoryview], None]
    ) -> None:
        self._file, self._name, self._view, self._digest = file, name, memoryview(buffer), digest
        self.position = 0

    def seek(self, position: int) -> None:
        """The next chunk begins here."""
        self._file.seek(position)

    def _read_into(self, view: memoryview) -> int:
        try:
            return int(self._file.readinto(view))  # type: ignore[attr-defined]  # raw file
        except OSError as error:
            raise ModelCorruptError(
                f"{self._name} cannot be read: {error.strerror}. Check the volume it lies on."
            ) from None

    def chunks(self, size: int, what: str) -> Any:
        """Views of the buffer, valid until the next one; all but the last are full."""
        while size:
            wanted = min(size, len(self._view))
            filled = 0
            while filled < wanted:
                count = self._read_into(self._view[filled:wanted])
                if not count:
                    raise ModelCorruptError(f"{self._name} ends within {what}. {_REMEDY}")
                filled += count
            chunk = self._view[:wanted]
            self._digest(chunk)
            self.position += wanted
            size -= wanted
            yield chunk


def _shard_names(files: ModelFiles) -> list[str]:
    if files.exists(_INDEX):
        weight_map = files.read_json(_INDEX, _INDEX_LIMIT).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelCorruptError(f"{_INDEX} has no object 'weight_map'. {_REMEDY}")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if not is_plain_name(name) or not name.endswith(".safetensors"):
                raise ModelCorruptError(
                    f"{_INDEX} names {name[:100]!r}, which is no safetensors file beside it."
                )
        if len(names) > _MAX_SHARDS:
            raise ModelCorruptError(
                f"{_INDEX} names {len(names)} files; more than {_MAX_SHARDS} are not believable."
            )
        return names
    if files.exists(_SINGLE):
        return [_SINGLE]
    if any(next(files.root.glob(pattern), None) for pattern in _PICKLED):
        raise ConfigError(
            "The model directory holds pickled weights, which can run code when read, and no safetensors. "
            "Use the model's safetensors release, or convert it where you trust it."
        )
    raise ModelNotFoundError(f"The model directory has neither {_SINGLE} nor {_INDEX}. {_REMEDY}")


def inspect_file(files: ModelFiles, name: str) -> Shard:
    """Read and check the header of one file; what it should hold is the caller's to say."""
    with files.opened_unchecked(name) as (file, size):
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise ModelCorruptError(
                f"{name} is no safetensors file, or is cut short ({size} bytes). {_REMEDY}"
            )
        header = parse_json_object(file.read(length), name)
    header.pop("__metadata__", None)
    if len(header) > _MAX_TENSORS:
        raise ModelCorruptError(
            f"{name} names {len(header)} tensors; more than {_MAX_TENSORS} are not believable."
        )
    spans = sorted(
        (_entry(name, tensor, entry) for tensor, entry in header.items()), key=lambda span: span[:2]
    )
    position = 0
    for begin, end, tensor in spans:
        if begin != position:
            raise ModelCorruptError(
                f"{name}: tensor {tensor.name[:100]!r} does not follow the one before it. {_REMEDY}"
            )
        position = end
    if 8 + length + position != size:
        raise ModelCorruptError(
            f"{name} has {size} bytes, and its header describes {8 + length + position}; it was cut short, "
            f"or is damaged. {_REMEDY}"
        )
    return Shard(name, 8 + length, tuple(tensor for _, _, tensor in spans))


def _entry(file_name: str, name: str, entry: Any) -> tuple[int, int, _Tensor]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise ModelCorruptError(
            f"{file_name}: tensor {name[:100]!r} has a bad header entry. {_REMEDY}"
        ) from None
    if not all(type(item) is int and 0 <= item < 1 << 48 for item in sizes) or len(shape) > 8:
        raise ModelCorruptError(f"{file_name}: tensor {name[:100]!r} has a bad shape or offset. {_REMEDY}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(
            f"{file_name}: tensor {name[:100]!r} has dtype {json.dumps(dtype)[:40]}; "
            f"supported: {', '.join(DTYPES)}."
        )
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != size:
        raise ModelCorruptError(
            f"{file_name}: tensor {name[:100]!r} of shape {shape} takes {size} bytes, "
            f"not {end - begin}. {_REMEDY}"
        )
    return begin, end, _Tensor(name, DTYPES[dtype], tuple(shape), size)
