"""Imports the modules under test with a record in each exception handler, as pytest rewrites asserts.

In every process of a test run: pytest's own by the conftest of the repository, others by
`startup/sitecustomize.py`, which Python imports when it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

from e2e.failure_paths import recorder

#: The gateway and quire-batch; the operator and its metrics adapter; of the server, what the engine process
#: consists of, and the two processes that judge it.
PACKAGES = (
    "quire_batch",
    "quire_gateway",
    "quire_metrics_adapter",
    "quire_operator",
    "quire_server.core",
    "quire_server.engine",
    "quire_server.fault_injection",
    "quire_server.health",
    "quire_server.kv_transfer",
    "quire_server.layers",
    "quire_server.model_dir",
    "quire_server.models",
    "quire_server.runner",
    "quire_server.supervisor",
    "quire_server.termination",
)

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def covers(module: str) -> bool:
    """Whether the handlers of this module are recorded."""
    return any(module == package or module.startswith(f"{package}.") for package in PACKAGES)


def environment(python_path: str) -> dict[str, str]:
    """The variables with which a child process records as well, if this is a recorded run. `python_path`: the
    PYTHONPATH that it would have else.
    """
    if not (folder := os.environ.get(recorder.VARIABLE)):
        return {}
    paths = [_STARTUP, *(path for path in python_path.split(os.pathsep) if path not in ("", _STARTUP))]
    return {recorder.VARIABLE: folder, "PYTHONPATH": os.pathsep.join(paths)}


def install() -> None:
    """Record the handlers of what this process imports from now on, if this is a recorded run."""
    if os.environ.get(recorder.VARIABLE) and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds modules as Python does, and has those that are covered loaded by `_Loader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not covers(name):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if type(spec.loader) is SourceFileLoader:
                    spec.loader = _Loader(name, spec.loader.path)
                return spec
        return None


class _Loader(SourceFileLoader):
    """Compiles the instrumented module, and keeps its bytecode with the records, not beside the source."""

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        # Only here: it parses, which a process that finds the bytecode need not do.
        from e2e.failure_paths import handlers  # noqa: PLC0415

        tree = handlers.instrumented(self.name, data)
        return super().source_to_code(tree, path, _optimize=_optimize)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_place(path))

    def set_data(self, path: str, data: Buffer, *, _mode: int = 0o666) -> None:
        super().set_data(_place(path), data, _mode=_mode)


def _place(path: str) -> str:
    if not path.endswith(".pyc"):
        return path
    return os.path.join(os.environ[recorder.VARIABLE], "bytecode", path.lstrip(os.sep))
