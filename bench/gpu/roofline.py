"""Part: every kernel beside the fastest copy and the fastest product of the same run."""

from functools import partial

from bench.gpu import attention_cases, other_cases
from bench.gpu.case import SHEET, Case, measure
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.sizes import Sizes

TITLE = "Kernels beside the ceilings"
SECONDS = 150
COLUMNS = ("us", "GB/s", "% of the copy", "% of 4.8 TB/s", "TFLOP/s", "% of the product", "workspace, MiB")


def cases(sizes: Sizes) -> list[Case]:
    """Ceilings first."""
    return [*other_cases.ceilings(sizes), *attention_cases.cases(sizes), *other_cases.cases(sizes)]


def goals(sizes: Sizes) -> dict[str, str]:
    """What is to be reached, by row."""
    return {case.name: case.goal for case in cases(sizes)}


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """Each case once."""
    for case in cases(sizes):
        ledger.measure(case.name, partial(measure, place, case, sizes.cold))


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    copy, product = (
        rows.get(name, {}).get(unit)
        for name, unit in ((other_cases.COPY, "GB/s"), (other_cases.PRODUCT, "TFLOP/s"))
    )
    moved, computed = row.get("GB/s"), row.get("TFLOP/s")
    return {
        "us": f"{row['us']:,.1f}",
        "GB/s": "" if moved is None else f"{moved:,.0f}",
        "% of the copy": _share(moved, copy),
        "% of 4.8 TB/s": _share(moved, SHEET / 1e9),
        "TFLOP/s": "" if computed is None else f"{computed:,.1f}",
        "% of the product": _share(computed, product),
        "workspace, MiB": f"{row['peak_bytes'] / 2**20:,.1f}",
    }


def _share(value: float | None, whole: float | None) -> str:
    return "" if value is None or not whole else f"{value / whole:.0%}"
