"""Where there is a GPU, every op has its kernel; where there is none, none of them costs an import."""

import subprocess
import sys

# In a process of its own, since it imports all twice; torch is imported once, which takes most of the time.
PROGRAM = """
import importlib, pathlib, sys, torch
for there in (False, True):
    torch.cuda.is_available = lambda: there
    for name in [name for name in sys.modules if name.startswith("quire_kernels")]:
        del sys.modules[name]
    folder = pathlib.Path(importlib.import_module("quire_kernels").__file__).parent
    for path in sorted(folder.glob("*.py")):
        if "triton" not in path.stem and path.stem != "__init__" and not path.stem.endswith("configurations"):
            importlib.import_module(f"quire_kernels.{path.stem}")
    print(there, "triton" in sys.modules)
"""


def test_triton_is_imported_where_there_is_a_gpu_and_nowhere_else() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["False", "False", "True", "True"], ended.stderr
