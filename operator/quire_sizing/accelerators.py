"""Common accelerators by their data sheets: the one table of them.

The AcceleratorProfiles that the chart ships have the same values, which a contract test checks. GB are 10^9
bytes, slightly less than the drivers report. With GDDR6 (T4, L4, A10, L40S) a process gets about 1 % less
than the sheet says: 15.8 GB of a T4, 47.8 GB of an L40S.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_sizing.memory import Accelerator

_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """An accelerator, where its numbers are from, and what nodes call it."""

    accelerator: Accelerator
    source: str
    resource_name: str


def _sheet(
    memory: int, bandwidth: int, link: str = "NVLink", *, source: str, by: str = "nvidia.com/gpu"
) -> Sheet:
    """From GB and GB per second."""
    return Sheet(
        accelerator=Accelerator(memory=memory * _GB, bandwidth=bandwidth * _GB, interconnect=link),
        source=source,
        resource_name=by,
    )


SHEETS = {
    "t4-16gb": _sheet(16, 320, "PCIe", source="NVIDIA T4 Tensor Core GPU, datasheet (2019)"),
    "l4-24gb": _sheet(24, 300, "PCIe", source="NVIDIA L4 Tensor Core GPU, datasheet (2023)"),
    "a10-24gb": _sheet(24, 600, "PCIe", source="NVIDIA A10 Tensor Core GPU, datasheet (2021)"),
    "a100-40gb": _sheet(40, 1555, source="NVIDIA A100, datasheet (2020), SXM4"),
    "a100-80gb": _sheet(80, 2039, source="NVIDIA A100, datasheet (2021), SXM4"),
    "l40s-48gb": _sheet(48, 864, "PCIe", source="NVIDIA L40S GPU, datasheet (2023)"),
    "h100-80gb": _sheet(80, 3350, source="NVIDIA H100 Tensor Core GPU, datasheet (2023), SXM5"),
    "h200-141gb": _sheet(141, 4800, source="NVIDIA H200 Tensor Core GPU, datasheet (2024), SXM5"),
    "b200-180gb": _sheet(180, 8000, source="NVIDIA DGX B200, datasheet (2024), an eighth of it"),
    "mi300x-192gb": _sheet(
        192, 5300, "InfinityFabric", source="AMD Instinct MI300X, data sheet (2023), a link", by="amd.com/gpu"
    ),
}
