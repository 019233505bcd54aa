"""Where there is a GPU, every op has its kernel; where there is none, none of them costs an import."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
torch.cuda.is_available = lambda: {there}
import importlib, pathlib, quire_kernels
for path in sorted(pathlib.Path(quire_kernels.__file__).parent.glob("*.py")):
    if "triton" not in path.stem and path.stem not in ("__init__", "configurations"):
        importlib.import_module(f"quire_kernels.{{path.stem}}")
print("triton" in sys.modules)
"""


@pytest.mark.parametrize("there", [False, True])
def test_triton_is_imported_where_there_is_a_gpu_and_nowhere_else(there: bool) -> None:
    program = [sys.executable, "-c", PROGRAM.format(there=there)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.stdout.strip(), ended.returncode) == (str(there), 0), ended.stderr
