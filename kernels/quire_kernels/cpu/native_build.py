"""Compiles csrc/ into the library that `native` loads: python native_build.py. Needs only gcc (or $CC).

A program for `make setup` and the image build. It imports nothing of the package, which would import torch.
Without the library everything works by torch, only slower.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "libquire_cpu.so"
# OpenMP symbols stay unresolved at link time: torch loads its own libgomp, and a second one would create a
# second thread pool on the same cores.
_FLAGS = [
    "-O3",
    "-std=c11",
    "-ffp-contract=off",
    "-Wall",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
]
_VECTORS = {
    "avx512_vnni": ["-mfma", *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni"))],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
_ANY: dict[str, list[str]] = {"any": []}
#: What sources are compiled for, each a kernel of its own: those that are not here, for the vectors above.
_TARGETS = {
    "run_calls.c": _ANY,
    "sample_tokens.c": {**_VECTORS, **_ANY},
    "shm_collectives.c": _ANY,
    "support.c": _ANY,
}


def main() -> None:
    """Compile and link; a failure shows gcc's output. Without x86-64 or a compiler no library is built."""
    compiler = os.environ.get("CC", "gcc")
    if platform.machine() != "x86_64" or shutil.which(compiler) is None:
        sys.stderr.write("no x86-64 or no gcc: the CPU kernels are not built, and torch does their work\n")
        return
    objects = []
    for source in sorted((PACKAGE / "csrc").glob("*.c")):
        for name, flags in _TARGETS.get(source.name, _VECTORS).items():
            target = source.with_suffix(f".{name}.o")
            subprocess.run([compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(target)], check=True)
            objects.append(target)
    partial = LIBRARY.with_suffix(".partial")
    subprocess.run([compiler, "-shared", "-o", str(partial), *map(str, objects), "-lm"], check=True)
    partial.replace(LIBRARY)
    for target in objects:
        target.unlink()


if __name__ == "__main__":
    main()
