"""What the tokens of a greedy answer depend on: the model's content, the arithmetic, the device, the code.

Two engines whose facts are equal compute the same tokens, unless one of them is damaged. Where that is in
doubt a fact is rather too specific: engines with different facts are never compared.
"""

import dataclasses
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from quire_server.layers.int8_linear import native_kernels
from quire_server.model_dir.files import ModelFiles
from quire_server.runner.config import RunnerConfig

_PACKAGES = ("quire_server", "quire_kernels")
_CPU_INFO = Path("/proc/cpuinfo")
# Settings without an effect on the canary, which asks for no watermark, and for no adapter. The first one
# holds a secret.
_WITHOUT_EFFECT = ("watermark", "shares_kv_cache", "kv_staging_bytes", "max_adapters", "max_adapter_rank")


def facts(
    model_dir: Path, options: RunnerConfig, *, is_gpu: bool, **effective: object
) -> Mapping[str, object]:
    """`effective`: what is served, where the options leave it open."""
    settings = {
        field.name: _plain(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.name not in _WITHOUT_EFFECT
    }
    return {
        "model": model_digest(model_dir),
        "settings": settings,
        "effective": effective,
        "device": _gpu() if is_gpu else _cpu(),
        "torch": torch.__version__,
        "code": code_digest(),
    }


def kv_layout(model_dir: Path, layout: Mapping[str, object]) -> bytes:
    """All that the bytes of KV blocks depend on, a line of name and value each. Not which CPU or GPU: blocks
    from another one are as good. Servers of which a line differs exchange none.
    """
    facts = {**layout, "model": model_digest(model_dir), "torch": torch.__version__, "code": code_digest()}
    return "\n".join(f"{name}={value}" for name, value in sorted(facts.items())).encode()


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def model_digest(directory: Path) -> str:
    """A digest of the content: of the manifest, which loading has checked. Without one, of names, sizes and
    times of change: other weights in the same place are another model, and so is a copy elsewhere.
    """
    files = ModelFiles.open(directory)
    if files.manifest:
        return _digest(
            f"{name} {entry.size} {entry.sha256}" for name, entry in sorted(files.manifest.items())
        )
    found = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors"))
    return _digest(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in found)


def _gpu() -> Mapping[str, object]:
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _cpu() -> Mapping[str, object]:
    """Model and features of the CPU, by which libraries choose their kernels, and the threads that share a
    sum.
    """
    text = _CPU_INFO.read_text(errors="replace") if _CPU_INFO.exists() else ""
    first = text.partition("\n\n")[0]
    named: dict[str, str] = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", first, re.MULTILINE))
    return {
        "cpu": named.get("model name", ""),
        "features": _digest([named.get("flags") or named.get("Features") or ""]),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": native_kernels(),
        "threads": torch.get_num_threads(),
    }


def code_digest() -> str:
    """A digest of the code itself: two builds may have one version."""
    return _digest(_code_files())


def _code_files() -> Iterator[str]:
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        root = Path(spec.origin).parent if spec is not None and spec.origin else Path()
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".so"):
                yield f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _digest(lines: Iterator[str] | list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
