"""The CPU kernels of csrc/, where they were built (`native_build`) and the CPU has AVX-512 VNNI.

Called by the ops, each of which asks `native` whether its tensors suit and otherwise computes by torch. The
library shares torch's OpenMP threads: `torch.set_num_threads` counts for both.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = Path(__file__).with_name("libquire_cpu.so")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_HEAD_SIZES = (64, 96, 128, 256)
_MAX_BLOCK, _MAX_GROUP = 64, 64

_P, _I, _F, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "quire_int8_linear": [_P] * 5 + [_I] * 3 + [_D],
    "quire_add_rmsnorm": [_P] * 4 + [_I] * 2 + [_F, _D],
    "quire_silu_mul": [_P] * 2 + [_I] * 2 + [_D],
    "quire_rope_kv_write": [_P] * 7 + [_I] * 5 + [_D],
    "quire_decode_attention": [_P] * 6 + [_I] * 7 + [_F, _D],
}


class Native:
    """Typed calls; callers have checked with ``takes`` and ``attends`` what the C code takes for granted."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, None
        self._library = library

    def takes(self, *tensors: Tensor | None) -> bool:
        """One dtype that the kernels know, on the CPU, contiguous, rows of whole registers."""
        given = [tensor for tensor in tensors if tensor is not None]
        dtype = given[0].dtype
        return dtype in _DTYPES and all(
            t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous() and t.shape[-1] % 32 == 0
            for t in given
        )

    def attends(self, q: Tensor, k_cache: Tensor) -> bool:
        """Whether decode attention over this cache can be computed."""
        num_kv_heads, block_size, head_size = k_cache.shape[1:]
        return (
            q.dtype == k_cache.dtype
            and q.dtype in _DTYPES
            and head_size in _HEAD_SIZES
            and block_size % 4 == 0
            and block_size <= _MAX_BLOCK
            and q.shape[1] <= _MAX_GROUP * num_kv_heads
            and k_cache.is_contiguous()
            and q.is_contiguous()
        )

    def int8_linear(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]; ``packed`` [out / 16, in / 4, 16, 4], scales and bias float32 [out]."""
        rows, in_size = x.shape
        out_size = scales.shape[0]
        y = torch.empty(rows, out_size, dtype=x.dtype)
        self._library.quire_int8_linear(
            x.data_ptr(),
            packed.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows,
            in_size,
            out_size,
            _DTYPES[x.dtype],
        )
        return y

    def add_rmsnorm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """As ``add_rmsnorm_reference``."""
        y = torch.empty_like(x)
        self._library.quire_add_rmsnorm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            *x.shape,
            eps,
            _DTYPES[x.dtype],
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As ``silu_mul_reference``."""
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self._library.quire_silu_mul(
            gate_up.data_ptr(), y.data_ptr(), rows, width // 2, _DTYPES[gate_up.dtype]
        )
        return y

    def rope_kv_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """As ``rope_kv_write_reference``, for rotations of whole heads."""
        num_kv_heads, block_size, head_size = k_cache.shape[1:]
        tokens, width = qkv.shape
        num_heads = width // head_size - 2 * num_kv_heads
        q = torch.empty(tokens, num_heads, head_size, dtype=qkv.dtype)
        self._library.quire_rope_kv_write(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            q.data_ptr(),
            tokens,
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
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        """As ``paged_decode_attention_reference`` without a soft cap; a table of one row is everybody's."""
        sequences, num_heads, head_size = q.shape
        num_kv_heads, block_size = k_cache.shape[1:3]
        self._library.quire_decode_attention(
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table.contiguous().data_ptr(),
            seq_lens.data_ptr(),
            out.data_ptr(),
            sequences,
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
            block_table.shape[1] if block_table.dim() == 2 else 0,
            window or 0,
            scale,
            _DTYPES[q.dtype],
        )


def _load() -> Native | None:
    if not _LIBRARY.exists():
        return None
    library = ctypes.CDLL(str(_LIBRARY))
    return Native(library) if library.quire_cpu_is_supported() else None


NATIVE = _load()
