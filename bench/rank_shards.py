"""What each rank of a divided model reads from the disk and holds in memory (used by ``bench.distributed``).

Bytes read are those that the kernel counts for this process while it loads a rank's part; bytes held are
those of its tensors in the form that they compute with.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.compare import table
from bench.tensor_parallel import MODEL, write_model
from quire_server.core.topology import Topology
from quire_server.layers.parallel import SingleRank
from quire_server.models.decoder import Decoder
from quire_server.runner.loader import Checkpoint

RANKS = (2, 4)
FORMS = {"bfloat16": "none", "int8": "int8"}  # name -> how the matrices are quantised
SPARE = 1.02
_CPU, _LENGTH, _MIB = torch.device("cpu"), 64, 1 << 20


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    (found,) = re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(found)


def tensors(model: Decoder) -> Iterator[Tensor]:
    """All weights, each once."""
    assert model.head is not None, "one stage"
    yield model.embedding
    yield from model.head.weights()
    yield model.norm.weight
    for layer in model.layers:
        yield from (norm.weight for norm in layer.norms.values())
        for linear in layer.linears:
            yield from linear.weights()


def measured(load: Callable[[], Decoder]) -> tuple[int, int, int]:
    """Bytes (read, of vectors held, of everything held). Vectors (norms, scales of columns, biases) may be
    needed whole by every rank.
    """
    before = bytes_read()
    model = load()
    read, held = bytes_read() - before, list(tensors(model))
    vectors = sum(each.nbytes for each in held if each.numel() == max(each.shape, default=1))
    return read, vectors, sum(each.nbytes for each in held)


HEADS = [
    "weights",
    "ranks",
    "all: read, held MiB",
    "a rank: read, held MiB",
    "bound: read, held MiB",
    "within",
]


def rows(model: LlamaConfig = MODEL) -> list[list[str]]:
    """One for each form and number of ranks; of the ranks that which has most."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model)
        for form, quantization in FORMS.items():
            checkpoint = Checkpoint.open(Path(folder), dtype="bfloat16", quantization_name=quantization)
            whole = measured(
                lambda checkpoint=checkpoint: checkpoint.read(  # type: ignore[misc]  # a lambda of a loop
                    max_len=_LENGTH, device=_CPU, on_progress=lambda loaded, total: None
                )
            )
            for ranks in RANKS:
                parts = [
                    measured(
                        lambda checkpoint=checkpoint, ranks=ranks, rank=rank: checkpoint.read_shard(  # type: ignore[misc]  # a lambda of a loop
                            Topology(ranks, rank), SingleRank(), max_len=_LENGTH, device=_CPU
                        )
                    )
                    for rank in range(ranks)
                ]
                found.append(_row(form, ranks, whole, parts))
    return found


def _row(form: str, ranks: int, whole: tuple[int, int, int], parts: list[tuple[int, int, int]]) -> list[str]:
    all_read, vectors, all_held = whole
    bounds = [SPARE * (total - vectors) / ranks + vectors for total in (all_read, all_held)]
    most = [max(part[index] for part in parts) for index in (0, 2)]
    is_within = all(value <= bound for value, bound in zip(most, bounds, strict=True))
    pairs = ((all_read, all_held), most, bounds)
    cells = [", ".join(f"{value / _MIB:.2f}" for value in pair) for pair in pairs]
    return [form, str(ranks), *cells, "yes" if is_within else "**no**"]


def report(model: LlamaConfig = MODEL) -> str:
    """The table."""
    return table(HEADS, rows(model))
