"""Records which compile keys launches of Triton kernels have, and computes nothing.

Triton compiles a kernel once for each key, for 2 to 5 s, at the first launch that has it. Keys are made by
Triton's own code, as at a launch on an NVIDIA GPU; tensors are those of a CPU, whose addresses are aligned as
a GPU's are. What kernels would have written is random.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))
_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class CompileKey(NamedTuple):
    """``arguments``: name, type, and "1", "D" (a multiple of 16) or nothing, or the constant's value.
    ``options``: warps, stages.
    """

    kernel: str
    arguments: tuple[tuple[str, str, object], ...]
    options: tuple[tuple[str, object], ...]

    def of(self, *names: str) -> dict[str, object]:
        """What these arguments contribute."""
        return {name: what for name, _, what in self.arguments if name in names}

    def differs_from(self, other: "CompileKey") -> dict[str, tuple[object, object]]:
        """By argument or option, of two keys of one kernel."""
        mine, theirs = self._flat(), other._flat()
        return {name: (theirs.get(name), value) for name, value in mine.items() if theirs.get(name) != value}

    def _flat(self) -> dict[str, object]:
        return {name: (kind, what) for name, kind, what in self.arguments} | dict(self.options)


class CompileKeys:
    """The keys that were met, each with the name of the stage that met it first."""

    def __init__(self) -> None:
        self.stage = "start"
        self.first: dict[CompileKey, str] = {}
        self.launches = 0

    def note(self, kernel: JITFunction, args: Sequence[Any], more: Mapping[str, Any]) -> None:
        """A launch."""
        self.launches += 1
        bound, specialization, options = _binder(kernel)(*args, **more)
        given = tuple(
            (name, kind, value if kind == "constexpr" else what)
            for (name, value), (kind, what) in zip(bound.items(), specialization, strict=True)
        )
        key = CompileKey(kernel.fn.__name__, given, tuple(sorted(options.items())))
        self.first.setdefault(key, self.stage)

    def met_in(self, stage: str) -> list[CompileKey]:
        """The keys that this stage met first."""
        return [key for key, first in self.first.items() if first == stage]

    def explain(self, stage: str) -> str:
        """Each key that the stage met first, by its difference from the nearest one of earlier stages."""
        new = self.met_in(stage)
        lines = []
        for key in new:
            others = [other for other in self.first if other.kernel == key.kernel and other not in new]
            nearest = min((key.differs_from(other) for other in others), key=len, default=None)
            said = "not met before" if nearest is None else str(nearest)
            lines.append(f"{key.kernel}: {said}")
        return "\n".join(lines)


@cache
def _binder(kernel: JITFunction) -> Callable[..., Any]:
    made: Callable[..., Any] = create_function_from_signature(kernel.signature, kernel.params, _BACKEND)
    return made


class _Random(TorchFunctionMode):
    """What a kernel would have filled holds numbers, by which requests go on in different ways."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return result.uniform_() if result.dtype in (torch.float32, torch.bfloat16) else result.zero_()
        return result


@contextmanager
def recorded() -> Iterator[CompileKeys]:
    """Within it ``kernel[grid](...)`` is recorded."""
    keys = CompileKeys()

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        keys.note(self, args, more)

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", note))
        stack.enter_context(_Random())
        yield keys
