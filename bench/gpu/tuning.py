"""Part: a sweep over the launch configs of the attention kernels; writes `quire_kernels.tuned_configs`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from bench.gpu import attention_cases
from bench.gpu.case import Case, measure
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.sizes import TINY, Sizes
from quire_kernels.attention.paged_decode_attention_triton import paged_decode_attention_triton
from quire_kernels.attention.paged_prefill_attention_triton import (
    MANY_ROWS,
    Tiling,
    paged_prefill_attention_triton,
)
from quire_kernels.attention.split_kv_attention_triton import decode_splits
from quire_kernels.launch_config import compute_capability, dtype_name

TITLE = "Ways to launch the attention kernels"
SECONDS = 220
COLUMNS = ("us, geometric mean of the shapes",)
FILE = Path(__file__).parents[2] / "kernels" / "quire_kernels" / "tuned_configs.py"
# tile, warps, stages, programs a multiprocessor; rows, tile, warps, stages. The first holds by default.
_DECODE = (
    (64, 4, 3, 2), (32, 4, 3, 2), (64, 4, 5, 2), (64, 4, 3, 4), (32, 4, 2, 4), (64, 4, 3, 1), (32, 2, 5, 4),
    (64, 4, 6, 2), (64, 8, 3, 2), (128, 8, 3, 2), (128, 8, 5, 1), (32, 4, 6, 4),
)  # fmt: skip
_PREFILL = (
    (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2),
    (128, 32, 8, 3), (64, 128, 8, 2), (64, 32, 4, 3),
)  # fmt: skip
_LIKELY = 5  # of the ways are tried with other caches and heads: a run has not the time for all
_CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Way:
    """One launch config, measured over several shapes; ``key`` and ``entry`` are those of the table."""

    name: str
    table: str
    key: tuple[int | str | bool, ...]
    entry: tuple[int, ...]
    cases: tuple[Case, ...]


def ways(sizes: Sizes, place: Place | None = None) -> Iterator[Way]:
    """Shapes of an 8B model with two cache dtypes, and of a 1B model; ``place`` is needed to run them."""
    device = torch.device("cpu") if place is None else place.device
    shapes = [(sizes, name) for name in ("bf16", "fp8")]
    shapes += [(replace(sizes, head=64), "bf16")]
    for index, (some, cache) in enumerate(shapes[:1] if sizes is TINY else shapes):
        most = 2 if sizes is TINY else _LIKELY if index else None
        yield from _decode_ways(some, cache, device, _DECODE[:most])
        yield from _prefill_ways(some, cache, device, _PREFILL[:most])


def _decode_ways(
    sizes: Sizes, cache: str, device: torch.device, entries: Sequence[tuple[int, ...]]
) -> Iterator[Way]:
    group, dtype = sizes.q_heads // sizes.kv_heads, _CACHES[cache]
    key = (compute_capability(device), group, sizes.head, dtype_name(dtype))
    for entry in entries:
        tile, warps, stages, programs = entry
        cases = []
        for sequences, length in sizes.decodes[:4:2] or sizes.decodes:
            longest = -(-length // sizes.block) * sizes.block
            places = programs * _processors(device)
            splits = decode_splits(sequences, sizes.kv_heads, longest, places, tile)
            op = partial(paged_decode_attention_triton, tile=tile, warps=warps, stages=stages, splits=splits)
            cases.append(attention_cases.decode(sizes, sequences, length, dtype, cache, op=op))
        yield Way(
            f"decode, {group} x {sizes.head}, {cache}: {_text(entry)}", "DECODE", key, entry, tuple(cases)
        )


def _prefill_ways(
    sizes: Sizes, cache: str, device: torch.device, entries: Sequence[tuple[int, ...]]
) -> Iterator[Way]:
    dtype, group = _CACHES[cache], sizes.q_heads // sizes.kv_heads
    shapes = ((1, *sizes.prefix), *((sequences, length, 0) for sequences, length in sizes.prompts[:1]))
    few = ((4, MANY_ROWS // group, sizes.prefix[1]),)
    for is_long, some in ((True, shapes), (False, few)):
        key = (compute_capability(device), sizes.head, dtype_name(dtype), is_long)
        for entry in entries:
            op = partial(paged_prefill_attention_triton, tiling=Tiling(*entry))
            cases = tuple(
                attention_cases.prefill(sizes, *shape, dtype=dtype, name=cache, op=op) for shape in some
            )
            what = "long" if is_long else "short"
            name = f"prefill, {what} chunks, heads of {sizes.head}, {cache}: {_text(entry)}"
            yield Way(name, "PREFILL", key, entry, cases)


def _text(entry: Iterable[int]) -> str:
    return "/".join(map(str, entry))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def goals(sizes: Sizes) -> dict[str, str]:
    """No goals: the fastest config is selected."""
    return {way.name: "" for way in ways(sizes)}


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """Measure every config once, then write the table; on a GPU to the file that the kernels read."""
    for way in ways(sizes, place):
        ledger.measure(way.name, partial(_measure, place, way, sizes.cold))
    text = table(ways(sizes, place), ledger.rows)
    (ledger.folder / FILE.name).write_text(text, encoding="utf-8")
    if place.device.type == "cuda" and sizes is not TINY:
        FILE.write_text(text, encoding="utf-8")


def _measure(place: Place, way: Way, cold: int) -> Row:
    times = [measure(place, case, cold)["us"] for case in way.cases]
    return {"us": prod(times) ** (1 / len(times))}


def table(found: Iterable[Way], rows: dict[str, Row]) -> str:
    """The Python source of `quire_kernels.tuned_configs`: for each key the fastest of those that ran."""
    best: dict[tuple[str, tuple[int | str | bool, ...]], tuple[float, tuple[int, ...]]] = {}
    for way in found:
        if (us := rows.get(way.name, {}).get("us")) is not None:
            at = (way.table, way.key)
            best[at] = min(best.get(at, (us, way.entry)), (us, way.entry))
    lines, inside = [], ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith(("DECODE", "PREFILL")):
            inside = line.split(":")[0]
            entries = [
                f"    {key!r}: {entry!r},".replace("'", '"')
                for (name, key), (_, entry) in best.items()
                if name == inside
            ]
            declared = line.split(" = ")[0]
            lines += [f"{declared} = {{", *entries, "}"] if entries else [f"{declared} = {{}}"]
        elif not line.startswith(("    (", "}")):
            lines.append(line)
    return "\n".join(lines) + "\n"


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """The cells of the report's table."""
    return {COLUMNS[0]: f"{row['us']:,.1f}"}
