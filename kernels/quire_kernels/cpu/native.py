"""ctypes binding of the CPU kernels in csrc/; `NATIVE` is None unless they are built and the CPU has AVX-512
VNNI.

An op checks with ``supports`` and its variants whether its tensors fit a kernel, and falls back to torch. The
library runs on torch's OpenMP threads, so `torch.set_num_threads` applies to both.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quire_kernels.cpu.call_recorder import Call, Recorder
from quire_kernels.cpu.shm_group import Group
from quire_kernels.paged_kv_cache import KVCache, PagedKVCache

_LIBRARY = Path(__file__).with_name("libquire_cpu.so")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_HEAD_SIZES = (64, 96, 128, 256)
_MAX_BLOCK, _MAX_GROUP = 64, 64
_INT8_GROUP, _INT8_GROUP_BYTES = 64, 8
# Multiplications or elements below which a second thread costs more than it saves.
_SMALL_LINEAR, _SMALL_ATTENTION, _SMALL_PASS = 200_000, 65_536, 16_384
_LARGE_MASKS = 200_000  # logits; overwriting or reading one costs less than computing one

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _arguments(pointers: str, numbers: str, floats: str = "") -> type[ctypes.Structure]:
    """The kernel's argument struct as its .c file declares it: pointers, then integers, then floats."""
    typed = ((pointers, _P), (numbers, _I), (floats, _F))
    fields = [(name, kind) for names, kind in typed for name in names.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


_KERNELS = {
    "int8_linear": _arguments("x packed weight_scales bias y scratch", "in out dtype"),
    "add_rmsnorm": _arguments("x residual weight y", "size dtype", "eps"),
    "silu_mul": _arguments("gate_up y", "size dtype"),
    "rope_kv_write": _arguments(
        "qkv cos sin slots k_cache v_cache q", "heads kv_heads head_size block_size dtype"
    ),
    "take_rows": _arguments("table index y", "size first count"),
    "token_bitmask": _arguments("logits masks positions", "vocab words"),
    "decode_attention": _arguments(
        "q k_cache v_cache table lengths out",
        "heads kv_heads head_size block_size table_width window dtype",
        "scale",
    ),
    "largest": _arguments("x pairs", "width stride first dtype"),
    "largest_pair": _arguments("x y", "pairs"),
    "shm_all_reduce": _arguments("group x", "size dtype"),
    "shm_gather": _arguments("group x y", "size"),
}
_LACKED_MEMORY = 1


class _Call(ctypes.Structure):
    _fields_ = (("kernel", _P), ("arguments", _P))


class Native:
    """Typed calls of the C kernels, which check nothing: callers use ``supports`` and its variants first."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernels = {
            name: (_address(library, f"quire_{name}"), arguments) for name, arguments in _KERNELS.items()
        }
        self._library_run = library.quire_run
        self._library_run.argtypes = [_P, _I, _I, ctypes.c_int]
        self._library_run.restype = ctypes.c_int
        library.quire_shm_create.argtypes = [_P, _I, _I]
        library.quire_shm_create.restype = _I
        library.quire_shm_failed_group.restype = ctypes.POINTER(Group)
        self._library = library
        self._recorder: Recorder | None = None

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """A context in which calls are recorded instead of made; they return uninitialized memory."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def array_of(self, calls: Sequence[Call]) -> "ctypes.Array[_Call]":
        """The C array for ``run``. It points to the calls' arguments, which must outlive it."""
        made = [_Call(call.kernel, ctypes.addressof(call.arguments)) for call in calls]
        return (_Call * len(made))(*made)

    def run(self, calls: "ctypes.Array[_Call]", rows: int, *, is_large: bool) -> None:
        """Make the calls in order, each over the same number of rows."""
        self._run(calls, len(calls), rows, is_large)

    def _run(self, calls: object, count: int, rows: int, is_large: bool) -> None:
        failures = self._library_run(calls, count, rows, is_large)
        if failures & _LACKED_MEMORY:
            raise MemoryError("a CPU kernel got no memory to work in")
        if failures:
            raise self._library.quire_shm_failed_group().contents.error()

    def supports(self, *tensors: Tensor | None) -> bool:
        """Whether all are contiguous CPU tensors of one supported dtype whose rows fill whole registers."""
        given = [tensor for tensor in tensors if tensor is not None]
        dtype = given[0].dtype
        return dtype in _DTYPES and all(
            t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous() and t.shape[-1] % 32 == 0
            for t in given
        )

    def supports_attention(self, q: Tensor, cache: KVCache, out: Tensor | None) -> bool:
        """Whether ``decode_attention`` supports this cache and these tensors."""
        k_cache = cache.keys
        num_kv_heads, block_size, head_size = k_cache.shape[1:]
        return (
            q.dtype == k_cache.dtype
            and q.dtype in _DTYPES
            and q.device.type == "cpu"
            and head_size in _HEAD_SIZES
            and block_size % 4 == 0
            and block_size <= _MAX_BLOCK
            and q.shape[1] <= _MAX_GROUP * num_kv_heads
            and k_cache.is_contiguous()
            and q.is_contiguous()
            and (out is None or out.is_contiguous())
        )

    def supports_bitmask(self, logits: Tensor, bitmask: Tensor, out: Tensor | None) -> bool:
        """Whether ``token_bitmask`` can compute in ``out``, or in a copy of the logits if it is None."""
        tensors = (logits, bitmask) if out is None else (logits, bitmask, out)
        return logits.dtype == torch.float32 and all(
            one.device.type == "cpu" and one.is_contiguous() for one in tensors
        )

    def supports_largest(self, x: Tensor) -> bool:
        """Whether ``largest`` supports these rows, which may be parts of longer ones."""
        return x.dtype in _DTYPES and x.device.type == "cpu" and x.dim() == 2 and x.stride(1) == 1

    def int8_linear(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]; ``packed`` [out / 16, in / 4, 16, 4], scales and bias float32 [out]."""
        rows, in_size = x.shape
        out_size = scales.shape[0]
        y = self._empty((rows, out_size), x.dtype)
        scratch = self._empty((rows, in_size + in_size // _INT8_GROUP * _INT8_GROUP_BYTES), torch.int8)
        self._call(
            "int8_linear",
            rows,
            rows * in_size * out_size > _SMALL_LINEAR,
            x.data_ptr(),
            packed.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            in_size,
            out_size,
            _DTYPES[x.dtype],
        )
        return y

    def add_rmsnorm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """As ``add_rmsnorm_reference``."""
        rows, size = x.shape
        y = self._empty((rows, size), x.dtype)
        self._call(
            "add_rmsnorm",
            rows,
            rows * size > _SMALL_PASS,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            size,
            _DTYPES[x.dtype],
            eps,
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As ``silu_mul_reference``."""
        rows, width = gate_up.shape
        size = width // 2
        y = self._empty((rows, size), gate_up.dtype)
        is_large = rows * size > _SMALL_PASS
        dtype = _DTYPES[gate_up.dtype]
        self._call("silu_mul", rows, is_large, gate_up.data_ptr(), y.data_ptr(), size, dtype)
        return y

    def take_rows(self, table: Tensor, index: Tensor, first: int = 0) -> Tensor:
        """As ``take_partial_rows_reference``."""
        rows, size = index.shape[0], table.shape[1]
        y = self._empty((rows, size), table.dtype)
        is_large = rows * size > _SMALL_PASS
        self._call(
            "take_rows",
            rows,
            is_large,
            table.data_ptr(),
            index.data_ptr(),
            y.data_ptr(),
            size * table.itemsize,
            first,
            table.shape[0],
        )
        return y

    def token_bitmask(self, logits: Tensor, bitmask: Tensor, positions: Tensor) -> None:
        """As ``apply_token_bitmask_reference``, in place; the positions are not checked."""
        entries, words = bitmask.shape
        self._call(
            "token_bitmask",
            entries,
            entries * logits.shape[1] > _LARGE_MASKS,
            logits.data_ptr(),
            bitmask.data_ptr(),
            positions.data_ptr(),
            logits.shape[1],
            words,
        )

    def largest(self, x: Tensor, first: int) -> Tensor:
        """As ``largest_reference``."""
        rows, width = x.shape
        pairs = self._empty((rows, 2), torch.float32)
        is_large = rows * width > _LARGE_MASKS
        dtype = _DTYPES[x.dtype]
        self._call(
            "largest", rows, is_large, x.data_ptr(), pairs.data_ptr(), width, x.stride(0), first, dtype
        )
        return pairs

    def largest_pair(self, x: Tensor) -> Tensor:
        """As ``largest_pair_reference``."""
        rows, width = x.shape
        y = self._empty((rows, 2), torch.float32)
        self._call("largest_pair", rows, False, x.data_ptr(), y.data_ptr(), width // 2)
        return y

    def rope_kv_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: KVCache) -> Tensor:
        """As ``rope_kv_write_reference``, for rotations of whole heads."""
        num_kv_heads, block_size, head_size = cache.keys.shape[1:]
        tokens, width = qkv.shape
        num_heads = width // head_size - 2 * num_kv_heads
        q = self._empty((tokens, num_heads, head_size), qkv.dtype)
        self._call(
            "rope_kv_write",
            tokens,
            tokens * width > _SMALL_PASS,
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            q.data_ptr(),
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
            _DTYPES[qkv.dtype],
        )
        return q

    def decode_attention(
        self,
        q: Tensor,
        kv: PagedKVCache,
        scale: float,
        window: int | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As ``paged_decode_attention_reference`` without a soft cap.

        A one-dimensional block table, [blocks], is shared by all rows of q.
        """
        sequences, num_heads, head_size = q.shape
        num_kv_heads, block_size = kv.cache.keys.shape[1:3]
        if out is None:
            out = self._empty(q.shape, q.dtype)
        table = kv.block_table.contiguous()
        self._call(
            "decode_attention",
            sequences,
            q.numel() * table.shape[-1] * block_size > _SMALL_ATTENTION,
            q.data_ptr(),
            kv.cache.keys.data_ptr(),
            kv.cache.values.data_ptr(),
            table.data_ptr(),
            kv.seq_lens.data_ptr(),
            out.data_ptr(),
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
            table.shape[1] if table.dim() == 2 else 0,
            window or 0,
            _DTYPES[q.dtype],
            scale,
        )
        return out

    def shm_region_bytes(self, ranks: int, slot_bytes: int) -> int:
        """The size of the memory that ``ranks`` ranks share."""
        return int(self._library.quire_shm_create(None, ranks, slot_bytes))

    def shm_create(self, address: int, ranks: int, slot_bytes: int) -> None:
        """Prepare this memory, which is all zeros, for them."""
        self._library.quire_shm_create(address, ranks, slot_bytes)

    def shm_join(self, group: Group) -> bool:
        """Join as a rank. False where a process has joined as that rank before."""
        return bool(self._library.quire_shm_join(ctypes.byref(group)))

    def shm_abort(self, group: Group) -> None:
        """End the calls of all ranks, from any thread."""
        self._library.quire_shm_abort(ctypes.byref(group))

    def shm_all_reduce(self, group: Group, x: Tensor) -> None:
        """As ``all_reduce_reference``, in place, of contiguous [rows, ...]."""
        rows = x.shape[0]
        size = x.numel() // rows
        is_large = rows * size > _SMALL_PASS
        self._call(
            "shm_all_reduce", rows, is_large, ctypes.addressof(group), x.data_ptr(), size, _DTYPES[x.dtype]
        )

    def shm_gather(self, group: Group, x: Tensor) -> Tensor:
        """As ``gather_reference`` on rank 0, x on other ranks; x is contiguous [rows, n]."""
        rows, size = x.shape
        y = self._empty((rows, group.ranks * size), x.dtype) if group.rank == 0 else x
        self._call(
            "shm_gather",
            rows,
            rows * size > _SMALL_PASS,
            ctypes.addressof(group),
            x.data_ptr(),
            y.data_ptr(),
            size * x.itemsize,
        )
        return y

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._recorder is not None:
            return self._recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _call(self, name: str, rows: int, is_large: bool, *values: float | None) -> None:
        kernel, structure = self._kernels[name]
        arguments = structure(*values)
        if self._recorder is not None:
            self._recorder.calls.append(Call(kernel, arguments, is_large))
        else:
            self._run(ctypes.byref(_Call(kernel, ctypes.addressof(arguments))), 1, rows, is_large)


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), _P).value
    assert address is not None
    return address


def _load() -> Native | None:
    if not _LIBRARY.exists():
        return None
    library = ctypes.CDLL(str(_LIBRARY))
    return Native(library) if library.quire_cpu_is_supported() else None


NATIVE = _load()
