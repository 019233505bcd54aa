"""How the kernel of `paged_prefill_attention_triton` is compiled."""

import triton

from quire_kernels.configuration import ALL_GPUS, FP8_GPUS, Configuration
from quire_kernels.gpu_type import POINTERS
from quire_kernels.paged_prefill_attention_triton import Tiling, prefill_kernel
from quire_kernels.tuned import PREFILL


def _configuration(
    group: int, size: int, tiling: Tiling, *, cache: str = "bf16", block: int = 64, windowed: bool = False,
    capped: bool = False, gpus: tuple[int, ...] = ALL_GPUS,
) -> Configuration:  # fmt: skip
    types = {
        "q_ptr": "*bf16", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "table_ptr": "*i64",
        "lengths_ptr": "*i64", "bounds_ptr": "*i64", "out_ptr": "*bf16", "sequences": "i32",
        "q_stride": "i32", "out_stride": "i32", "block_stride": "i32", "head_stride": "i32",
        "scale_block_stride": "i32", "scale_head_stride": "i32", "table_stride": "i32", "scale": "fp32",
        "softcap": "fp32", "window": "i32",
    }  # fmt: skip
    if cache != "bf16":
        types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    constants = {
        "k_scales_ptr": None, "v_scales_ptr": None, "GROUP": group, "SIZE": size,
        "SIZE_BLOCK": triton.next_power_of_2(size), "BLOCK_SIZE": block, "ROWS": tiling.rows,
        "TILE": tiling.tile, "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    what = (", window" if windowed else "") + (", cap" if capped else "")
    shape = f"{tiling.rows} x {tiling.tile}/{tiling.warps}/{tiling.stages}"
    return Configuration(
        f"prefill {group} x {size}, blocks of {block}, {cache}{what}: {shape}",
        prefill_kernel,
        types,
        {name: value for name, value in constants.items() if name not in types},
        warps=tiling.warps,
        stages=tiling.stages,
        aligned=frozenset({"q_stride", "out_stride", "block_stride", "head_stride"}),
        expects=("mma", "async128"),
        gpus=tuple(gpu for gpu in gpus if cache != "fp8e4nv" or gpu in FP8_GPUS),
    )


_OWN = (
    _configuration(4, 128, Tiling(128, 64, 8, 2)),
    _configuration(4, 128, Tiling(128, 64, 8, 3)),
    _configuration(4, 128, Tiling(64, 64, 8, 2)),
    _configuration(4, 128, Tiling(128, 64, 8, 2), block=16),
    _configuration(4, 128, Tiling(64, 64, 8, 2), cache="fp8e4nv"),
    _configuration(4, 128, Tiling(64, 64, 8, 2), cache="i8"),
    _configuration(3, 64, Tiling(128, 64, 8, 2)),
    _configuration(1, 96, Tiling(128, 64, 8, 2)),
    _configuration(1, 80, Tiling(128, 64, 8, 2)),
    _configuration(2, 256, Tiling(64, 32, 8, 2), windowed=True, capped=True),
    _configuration(2, 256, Tiling(32, 32, 8, 2), cache="i8"),
    _configuration(2, 256, Tiling(32, 32, 8, 2), cache="fp8e4nv"),
    _configuration(8, 128, Tiling(128, 64, 8, 2), windowed=True),
)
_TUNED = (  # for the group of Llama 3
    _configuration(4, size, Tiling(*tiling), cache=POINTERS[cache])
    for (_, size, cache, _), tiling in PREFILL.items()
)
CONFIGURATIONS = tuple({each.name: each for each in (*_TUNED, *_OWN)}.values())
