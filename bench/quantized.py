"""The cost of ``quire-server quantize`` in quality: every scheme, on a text that it was not calibrated with
(a section of ``bench.cpu``).

Calibrated with the documentation strings of the standard library, measured on Python's language reference
(pydoc_data), so nothing is downloaded.
"""

import ast
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
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
BUDGETS = {"fp8": 0.5, "int8": 1.0, "awq": 10.0, "gptq": 10.0}
# Of these schemes, the row and the setting with which a CPU multiplies the stored integers, activations in
# int8 too.
SERVED = {
    "int8": ("int8, as served on this CPU", "auto"),
    "awq": ("awq, as served by Int4", "int4"),
    "gptq": ("gptq, as served by Int4", "int4"),
}
# What a model as served may lose at most, in percent.
BUDGETS_SERVED = {"awq": 10.0, "gptq": 10.0}
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
    """A table of the schemes, and of those that a CPU with int8 kernels multiplies as they are stored."""
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
            found = perplexity.measure(_opened(made), _opened(directory), tokens)
            rows.append([kind, f"{size / 1e6:.0f}", *_cells(found), _budget(BUDGETS, kind)])
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)  # the table itself takes half an hour
            if kind in SERVED:
                name, quantization = SERVED[kind]
                served = perplexity.measure(_opened(made, quantization), _opened(directory), tokens)
                rows.append([name, "", *_cells(served), _budget(BUDGETS_SERVED, kind)])
    heads = [
        "scheme",
        "file, MB",
        "perplexity",
        "above the original",
        "same likeliest token",
    ]
    return table([*heads, "wanted: at most"], rows) + (
        f"\n\nThe original has {found.original_perplexity:.3f}, computed in float32 as all but "
        f"the rows as served. {found.num_tokens:,} tokens of Python's language reference; calibrated with "
        "128 samples of 512 tokens of the standard library's documentation strings."
    )


def _opened(directory: Path, quantization: str = "none") -> Checkpoint:
    """As `--quantization` opens it; ``none``: exactly, in float32."""
    dtype = "float32" if quantization == "none" else "auto"
    return Checkpoint.open(directory, dtype=dtype, quantization_name=quantization)


def _budget(budgets: Mapping[str, float], kind: str) -> str:
    return f"{budgets[kind]:.1f} %" if kind in budgets else ""


def _cells(found: Quality) -> list[str]:
    return [f"{found.perplexity:.3f}", f"{100 * found.increase:+.2f} %", f"{100 * found.agreement:.1f} %"]
