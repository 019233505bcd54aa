"""Compiles csrc/ into the library that `native` loads: python native_build.py. Needs gcc (or $CC) and nothing
else.

Run by `make setup` and by the image build; imports nothing of the package, which would bring torch in.
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
# OpenMP's functions are left open: torch brings its own libgomp, and a second one would mean a second pool of
# threads on the same cores.
_FLAGS = [
    "-O3",
    "-std=c11",
    "-ffp-contract=off",
    "-Wall",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-mfma",
]
_FLAGS += [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]


def main() -> None:
    """Compile and link; a failure ends it with gcc's own words. No x86 or no compiler: no library."""
    compiler = os.environ.get("CC", "gcc")
    if platform.machine() != "x86_64" or shutil.which(compiler) is None:
        sys.stderr.write("no x86-64 or no gcc: the CPU kernels are not built, and torch does their work\n")
        return
    objects = []
    for source in sorted((PACKAGE / "csrc").glob("*.c")):
        target = source.with_suffix(".o")
        subprocess.run([compiler, *_FLAGS, "-c", str(source), "-o", str(target)], check=True)
        objects.append(target)
    partial = LIBRARY.with_suffix(".partial")
    subprocess.run([compiler, "-shared", "-o", str(partial), *map(str, objects), "-lm"], check=True)
    partial.replace(LIBRARY)
    for target in objects:
        target.unlink()


if __name__ == "__main__":
    main()
