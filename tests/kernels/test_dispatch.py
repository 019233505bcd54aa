"""The ops import their Triton kernels where there is a GPU, and never triton where there is none."""

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
    for path in sorted(folder.rglob("*.py")):
        if "triton" not in path.stem and path.stem not in ("__init__", "all_launch_configs"):
            importlib.import_module(".".join(path.relative_to(folder.parent).with_suffix("").parts))
    print(there, "triton" in sys.modules)
"""


def test_triton_is_imported_where_there_is_a_gpu_and_nowhere_else() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["False", "False", "True", "True"], ended.stderr
