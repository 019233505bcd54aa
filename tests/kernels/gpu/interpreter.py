"""Runs Triton kernels on CPU tensors, in any process and only within ``interpreted()``.

Triton chooses its interpreter by TRITON_INTERPRET at its first import, for the whole process. Here kernels
stay ordinary ones, which the same process can compile ahead of time, and are interpreted only within the
context. In it bfloat16 and FP8 are computed as on a GPU; the interpreter of triton 3.6 treats the bits of a
bfloat16 as an integer, truncates where a GPU rounds to nearest, and does not saturate.

It cannot find: races between programs (they run one after the other), shapes that a GPU refuses, float32
products in tf32, and reads beyond a tensor, which give garbage or end the process.
"""

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

import quire_kernels

_FLOATS = {
    tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32,
    tl.float64: torch.float64, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
_SIGNED = {8: (np.uint8, torch.uint8), 16: (np.int16, torch.int16), 32: (np.int32, torch.int32),
           64: (np.int64, torch.int64)}  # fmt: skip
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_convert_float, _dot = interpreter._convert_float, _Builder.create_dot
_binary, _unary, _cast, _splat = (
    _Builder.binary_op, _Builder.unary_op, _Builder.cast_impl, _Builder.create_splat,
)  # fmt: skip


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it ``kernel[grid](...)`` takes CPU tensors and computes at once."""
    _import_kernels()
    with ExitStack() as stack:
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = True
        stack.enter_context(patch.object(interpreter.InterpretedFunction, "__init__", _refused))
        for owner, name, replacement in _REPLACEMENTS:
            stack.enter_context(patch.object(owner, name, replacement, create=not hasattr(owner, name)))
        # Kernels refer to the language as `tl`, triton's own device functions as `core`.
        seen = FunctionType(interpreted.__wrapped__.__code__, {"tl": tl, "core": tl.core})
        stack.callback(interpreter._patch_lang(seen).restore)
        # Masked lanes may overflow and divide by zero, as on a GPU.
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        yield


@cache
def _import_kernels() -> None:
    """All kernels of the project. Imported while kernels are interpreted, they would be of another class, of
    which no launch is seen here.
    """
    for found in pkgutil.walk_packages(quire_kernels.__path__, "quire_kernels."):
        if found.name.endswith("_triton"):
            importlib.import_module(found.name)


def _refused(self: Any, fn: Callable[..., Any], **more: Any) -> None:
    raise RuntimeError(f"{fn.__name__}: import this kernel before kernels are interpreted")


@cache
def _rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    return interpreter.FunctionRewriter(fn).rewrite_ast()


class _Grid(interpreter.GridExecutor):  # type: ignore[misc]  # triton has no types
    """On a CPU arguments are in place, and are not copied back onto themselves: a tensor may be sparse."""

    def _restore_args_dev(self, *args: Any) -> None:
        """Nothing."""


def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
    """Run all programs of a launch, one after the other."""
    names = [parameter.name for parameter in self.params]
    _Grid(_rewritten(self.fn), names, grid)(*args, **more)


def _call(self: JITFunction, *args: Any, **more: Any) -> Any:
    return _rewritten(self.fn)(*args, **more)


def _is_bf16(handle: Any) -> bool:
    dtype = handle.dtype
    return getattr(dtype, "scalar", dtype) == tl.bfloat16 and handle.data.dtype == np.uint16


def _convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert bits of ``source`` to bits of ``target`` by torch: round to nearest even, FP8 saturates."""
    if source not in _FLOATS or target not in _FLOATS:
        return _convert_float(x, source, target, rounding)
    x = np.ascontiguousarray(x)
    given = torch.from_numpy(x.view(_SIGNED[source.primitive_bitwidth][0])).view(_FLOATS[source]).float()
    if target in (tl.float8e4nv, tl.float8e5):
        largest = torch.finfo(_FLOATS[target]).max
        given = given.clamp(-largest, largest)  # NaN stays NaN
    bits = given.to(_FLOATS[target]).view(_SIGNED[target.primitive_bitwidth][1]).numpy()
    return bits.view(_UNSIGNED[target.primitive_bitwidth]).reshape(x.shape)


def _widen(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    return _Handle(_convert(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def _narrow(data: Any) -> Any:
    return _Handle(_convert(np.asarray(data, np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16)


def _create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    return _dot(self, _widen(a), _widen(b), d, precision, imprecise)


def _binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if not (_is_bf16(left) and _is_bf16(right)):
        return _binary(self, left, right, op)
    result = op(_widen(left).data, _widen(right).data)
    return _Handle(result, tl.int1) if result.dtype == np.bool_ else _narrow(result)


def _unary_op(self: Any, handle: Any, op: Any) -> Any:
    return _narrow(op(_widen(handle).data)) if _is_bf16(handle) else _unary(self, handle, op)


def _cast_impl(self: Any, handle: Any, target: Any) -> Any:
    scalar = target.scalar
    if _is_bf16(handle) and scalar != tl.bfloat16:
        handle = _widen(handle)
    if scalar == tl.bfloat16 and handle.dtype.scalar != tl.bfloat16:
        return _narrow(handle.data)
    return _cast(self, handle, target)


def _create_splat(self: Any, *args: Any) -> Any:
    result = _splat(self, *args)
    given = args[-1] if isinstance(args[-1], _Handle) else args[0]
    # Results of comparisons stay boolean masks.
    return _Handle(result.data.astype(bool), tl.int1) if given.data.dtype == np.bool_ else result


_REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    (JITFunction, "run", launch),
    (JITFunction, "__call__", _call),
    (interpreter, "_convert_float", _convert),
    (_Builder, "create_dot", _create_dot),
    (_Builder, "binary_op", _binary_op),
    (_Builder, "unary_op", _unary_op),
    (_Builder, "cast_impl", _cast_impl),
    (_Builder, "create_splat", _create_splat),
    (_Builder, "get_bf16", lambda self, value: _narrow(np.array([value]))),
)


@triton.jit
def _self_test_kernel(a, b, product, combined, rounded, n: tl.constexpr):
    at = tl.arange(0, n)
    square = at[:, None] * n + at[None, :]
    left, right = tl.load(a + square), tl.load(b + square)
    tl.store(product + square, tl.dot(left, right))
    tl.store(combined + square, tl.where(left < right, left * right + 1.5, -left))
    tl.store(rounded + square, (tl.load(a + square).to(tl.float32) * 300).to(tl.float8e4nv))


def _self_test() -> None:
    """Without the replacements each of these results is wrong, without an error."""
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    product, combined = torch.empty(16, 16), torch.empty(16, 16, dtype=torch.bfloat16)
    rounded = torch.empty(16, 16, dtype=torch.float8_e4m3fn)
    with interpreted():
        _self_test_kernel[(1,)](a, b, product, combined, rounded, n=16)
    torch.testing.assert_close(product, a.float() @ b.float())
    torch.testing.assert_close(combined, torch.where(a < b, a * b + 1.5, -a), atol=0, rtol=0)
    expected = (a.float() * 300).clamp(-448, 448).to(torch.float8_e4m3fn)
    torch.testing.assert_close(rounded.float(), expected.float(), atol=0, rtol=0)


_self_test()
