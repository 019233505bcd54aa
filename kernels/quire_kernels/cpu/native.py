"""The CPU kernels in csrc/ that compute with vectors, compiled for AVX-512 VNNI and for AVX2. `NATIVE` has
those of the first that the CPU can run, and is None if it can run neither or they are not built.

The environment variable QUIRE_CPU_ISA (avx2 or none) leaves out better ones, for tests and comparisons.

An op checks with ``supports`` and its variants whether its tensors fit a kernel, and falls back to torch.
"""

import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quire_kernels.cpu.library import LIBRARY, Library, arguments
from quire_kernels.paged_kv_cache import KVCache, PagedKVCache

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_HEAD_SIZES = (64, 96, 128, 256)
_MAX_BLOCK, _MAX_GROUP = 64, 64
_INT8_GROUP, _INT8_GROUP_BYTES, _INT8_INPUT_BYTES = 64, 8, 2
_INT4_GROUP, _INT4_GROUP_BYTES = 32, 12
# Multiplications or elements below which a second thread costs more than it saves.
_SMALL_LINEAR, _SMALL_ATTENTION, _SMALL_PASS = 200_000, 65_536, 16_384
_LARGE_MASKS = 200_000  # logits; overwriting or reading one costs less than computing one

_KERNELS = {
    "int8_linear": arguments("x packed row_scales bias y scratch", "in out dtype"),
    "int4_linear": arguments("x packed scales zeros row_scales bias y scratch", "in out dtype"),
    "add_rmsnorm": arguments("x residual weight y", "size dtype", "eps"),
    "silu_mul": arguments("gate_up y", "size dtype"),
    "rope_kv_write": arguments(
        "qkv cos sin slots k_cache v_cache q", "heads kv_heads head_size block_size dtype"
    ),
    "take_rows": arguments("table index y", "size first count"),
    "token_bitmask": arguments("logits masks positions", "vocab words"),
    "decode_attention": arguments(
        "q k_cache v_cache table lengths out",
        "heads kv_heads head_size block_size table_width window dtype",
        "scale",
    ),
    "add_lora": arguments("x a b used of ends y shrunk", "in out parts width a_size b_size dtype"),
    "largest": arguments("x pairs", "width stride first dtype"),
    "largest_pair": arguments("x y", "pairs"),
}


#: What the kernels are compiled for, the fastest first.
Isa = Literal["avx512_vnni", "avx2"]
ISAS: tuple[Isa, ...] = ("avx512_vnni", "avx2")
ISA_VARIABLE = "QUIRE_CPU_ISA"


class Native:
    """Typed calls of the C kernels, which check nothing: callers use ``supports`` and its variants first."""

    def __init__(self, library: Library, isa: Isa) -> None:
        self.library, self.isa = library, isa
        self._empty = library.empty
        self._kernels = library.kernels(_KERNELS, isa)

    def _call(self, name: str, rows: int, is_large: bool, *values: float | None) -> None:
        self.library.call(self._kernels[name], rows, is_large, *values)

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

    def supports_lora(self, in_size: int, ends: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``add_lora`` supports layers of these inputs and ends of parts."""
        return dtype in _DTYPES and in_size % 16 == 0 and bool((ends % 16 == 0).all())

    def supports_lora_rows(self, x: Tensor, y: Tensor, a: Tensor) -> bool:
        """Whether ``add_lora`` supports these rows with these factors."""
        return x.dtype == y.dtype == a.dtype and x.is_contiguous() and y.is_contiguous()

    def add_lora(
        self,
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        used: Tensor,
        of: Tensor,
        ends: Tensor,
        width: int,
    ) -> None:
        """As ``HostLora.add``. ``width``: of the ranks of all parts, at the most."""
        rows, in_size = x.shape
        shrunk = self._empty((rows, width), torch.float32)
        self._call(
            "add_lora",
            rows,
            rows * width * in_size > _SMALL_LINEAR,
            x.data_ptr(),
            a.data_ptr(),
            b.data_ptr(),
            used.data_ptr(),
            of.data_ptr(),
            ends.data_ptr(),
            y.data_ptr(),
            shrunk.data_ptr(),
            in_size,
            y.shape[1],
            len(ends),
            width,
            a.shape[1],
            b.shape[1],
            _DTYPES[x.dtype],
        )

    def int8_linear(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]; ``packed`` [out / 16, in / 4, 16, 4], scales and bias float32 [out]."""
        row_bytes = x.shape[1] * _INT8_INPUT_BYTES + x.shape[1] // _INT8_GROUP * _INT8_GROUP_BYTES
        return self._linear("int8_linear", x, (packed, scales, bias), len(scales), row_bytes)

    def int4_linear(
        self,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        row_scales: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """x [T, in] -> [T, out]; ``packed`` u8 [out / 16, in / 8, 16, 4], scales f16 and zeros u8 [out / 16,
        in / 32, 16], row_scales and bias float32 [out].
        """
        row_bytes = x.shape[1] + x.shape[1] // _INT4_GROUP * _INT4_GROUP_BYTES
        weight = (packed, scales, zeros, row_scales, bias)
        return self._linear("int4_linear", x, weight, len(row_scales), row_bytes)

    def _linear(
        self, kernel: str, x: Tensor, weight: Sequence[Tensor | None], out_size: int, row_bytes: int
    ) -> Tensor:
        """``weight``: the kernel's tensors in its order. ``row_bytes``: of a row of x as it is quantised."""
        rows, in_size = x.shape
        y = self._empty((rows, out_size), x.dtype)
        scratch = self._empty((rows, row_bytes), torch.int8)
        self._call(
            kernel,
            rows,
            rows * in_size * out_size > _SMALL_LINEAR,
            x.data_ptr(),
            *(None if tensor is None else tensor.data_ptr() for tensor in weight),
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


def choices(library: Library | None) -> tuple[Isa, ...]:
    """The instruction sets whose kernels are built and run on this CPU, the fastest first."""
    return () if library is None else tuple(isa for isa in ISAS if library.runs(isa))


def choose(runnable: tuple[Isa, ...], wanted: str | None) -> Isa | None:
    """The best that is not better than what is wanted; None: torch computes."""
    if wanted is None:
        return next(iter(runnable), None)
    if wanted == "none":
        return None
    if wanted not in runnable:
        known = ", ".join((*runnable, "none"))
        raise ValueError(
            f"{ISA_VARIABLE} is {wanted!r}, and this machine runs: {known}. Set one of these, or unset it."
        )
    return wanted


def _native(library: Library | None) -> Native | None:
    isa = choose(choices(library), os.environ.get(ISA_VARIABLE))
    return None if library is None or isa is None else Native(library, isa)


NATIVE = _native(LIBRARY)
