"""The cost of ``quire-server quantize`` in quality: every scheme, on a text that it was not calibrated with
(a section of ``bench.cpu``).

Calibrated with the documentation strings of the standard library, measured on Python's language reference
(pydoc_data), so nothing is downloaded.
"""

import ast
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

from bench.compare import table
from quire_server.evaluate import perplexity
from quire_server.evaluate.perplexity import Quality
from quire_server.layers.quantized.format import Rounded
from quire_server.quantize import run
from quire_server.quantize.calibrated_layer import CalibratedLayer, ObservedLinear
from quire_server.quantize.gptq import Grid
from quire_server.quantize.schemes import SCHEMES, Scheme
from quire_server.runner.loader import Checkpoint
from quire_server.text.tokenizer import Tokenizer

# Allowed increase of the perplexity, in percent.
BUDGETS = {"fp8": 0.5, "int8": 1.0, "awq": 10.0, "gptq": 15.0}
_SHORTEST = 300  # characters, below which a string is not prose
_PLENTY = 2_000_000


def _to_the_nearest(block: CalibratedLayer) -> dict[ObservedLinear, Rounded]:
    """Four bits without an algorithm."""
    made = {}
    for linear in block.linears:
        rows, columns = linear.weight.shape
        groups = linear.weight.view(rows, columns // block.group_size, block.group_size)
        grid = Grid.around(groups, block.stored)
        made[linear] = Rounded(grid.codes(groups).flatten(1), grid.scales[..., 0], grid.zeros[..., 0])
    return made


KINDS: dict[str, Scheme] = {
    **SCHEMES,
    "4 bits to the nearest": replace(SCHEMES["gptq"], quantise=_to_the_nearest),
}


def calibration_text() -> str:
    """Documentation strings, file by file."""
    return "\n\n".join(_strings())[:_PLENTY]


def _strings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= _SHORTEST:
                    yield text


def report(directory: Path, windows: int = perplexity.MAX_WINDOWS, text: str | None = None) -> str:
    """A table of the schemes, and of int8 as computed by a CPU with int8 kernels."""
    tokens = Tokenizer.load(directory).encode(
        "\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False
    )
    tokens = tokens[: perplexity.WINDOW * windows]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text(text or calibration_text())
        for kind, scheme in KINDS.items():
            made = Path(folder) / kind
            run.run(directory, scheme, Path(folder) / "text", made, lambda line: None)
            size = (made / "model.safetensors").stat().st_size
            found = perplexity.measure(_opened(made, "float32"), _opened(directory, "float32"), tokens)
            budget = f"{BUDGETS[kind]:.1f} %" if kind in BUDGETS else ""
            rows.append([kind, f"{size / 1e6:.0f}", *_cells(found), budget])
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)  # the table itself takes half an hour
            if kind == "int8":
                served = perplexity.measure(_opened(made, "auto"), _opened(directory, "float32"), tokens)
                rows.append(["int8, as served on this CPU", "", *_cells(served), ""])
    heads = [
        "scheme",
        "file, MB",
        "perplexity",
        "above the original",
        "same likeliest token",
    ]
    return table([*heads, "wanted: at most"], rows) + (
        f"\n\nThe original has {found.original_perplexity:.3f}, computed in float32 as all but the "
        f"second row of int8. {found.num_tokens:,} tokens of Python's language reference; calibrated with "
        "128 samples of 512 tokens of the standard library's documentation strings."
    )


def _opened(directory: Path, dtype: str) -> Checkpoint:
    name = "none" if dtype == "float32" else "auto"
    return Checkpoint.open(directory, dtype=dtype, quantization_name=name)


def _cells(found: Quality) -> list[str]:
    return [f"{found.perplexity:.3f}", f"{100 * found.increase:+.2f} %", f"{100 * found.agreement:.1f} %"]
