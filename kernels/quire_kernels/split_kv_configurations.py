"""How the kernels of `split_kv_attention_triton` are compiled. Called by the ops that use them."""

import triton

from quire_kernels.configuration import ALL_GPUS, FP8_GPUS, Configuration
from quire_kernels.split_kv_attention_triton import REDUCE_WARPS, TILE, reduce_kernel, row_block, split_kernel


def split_configuration(
    name: str, group: int, size: int, tile: int, warps: int, stages: int, *, queries: int = 1,
    cache: str = "bf16", splits: int = 8, block: int = 64, windowed: bool = False, capped: bool = False,
    tree: bool = False, min_blocks: int = 3,
) -> Configuration:  # fmt: skip
    """One way to compile ``split_kernel``; its name starts with ``name``."""
    types = {
        "q_ptr": "*bf16", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "table_ptr": "*i64",
        "lengths_ptr": "*i64",
        "parts_ptr": "*bf16" if splits == 1 else "*fp32", "q_stride": "i32", "q_token_stride": "i32",
        "block_stride": "i32", "head_stride": "i32", "scale_block_stride": "i32", "scale_head_stride": "i32",
        "table_stride": "i32", "parts_stride": "i32", "parts_token_stride": "i32", "scale": "fp32",
        "window": "i32", "softcap": "fp32",
    }  # fmt: skip
    types |= {"tree_ptr": "*i64"} if tree else {}
    types |= {"weights_ptr": "*fp32"} if splits > 1 else {}
    types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"} if cache != "bf16" else {}
    constants = {
        "k_scales_ptr": None, "v_scales_ptr": None, "weights_ptr": None, "tree_ptr": None,
        "QUERIES": queries, "GROUP": group, "ROWS": row_block(queries, group), "SIZE": size,
        "SIZE_BLOCK": triton.next_power_of_2(size), "BLOCK_SIZE": block, "TILE": tile, "SPLITS": splits,
        "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    said = {"window": windowed, "cap": capped, "tree": tree, "whole": splits == 1}
    what = "".join(f", {word}" for word, is_so in said.items() if is_so)
    strides = {
        "q_stride",
        "q_token_stride",
        "block_stride",
        "head_stride",
        "parts_stride",
        "parts_token_stride",
    }
    return Configuration(
        f"{name} {group} x {size}, blocks of {block}, {cache}{what}: {tile}/{warps}/{stages}",
        split_kernel,
        types,
        {name: value for name, value in constants.items() if name not in types},
        warps=warps,
        stages=stages,
        aligned=frozenset(strides),
        expects=("mma", "async128"),
        min_blocks=min_blocks,
        gpus=FP8_GPUS if cache == "fp8e4nv" else ALL_GPUS,
    )


def reduce_configuration(name: str, size: int, splits: int, queries: int = 1) -> Configuration:
    """One way to compile ``reduce_kernel``."""
    types = {
        "parts_ptr": "*fp32", "weights_ptr": "*fp32", "lengths_ptr": "*i64", "out_ptr": "*bf16",
        "parts_stride": "i32", "out_stride": "i32", "out_token_stride": "i32", "window": "i32",
    }  # fmt: skip
    constants = {
        "QUERIES": queries, "SIZE": size, "SIZE_BLOCK": triton.next_power_of_2(size), "TILE": TILE,
        "SPLITS": splits, "WINDOWED": False,
    }  # fmt: skip
    return Configuration(
        f"{name}, {splits} parts of {size} weighed", reduce_kernel, types, constants, warps=REDUCE_WARPS,
        aligned=frozenset({"parts_stride", "out_stride", "out_token_stride"}), expects=("load128",),
        min_blocks=8,
    )  # fmt: skip
