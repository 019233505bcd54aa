"""Fastest launch configs of the attention kernels, measured and rewritten by `make bench-gpu`.

A key without an entry, such as a GPU that has not been measured, uses the kernel's default config.
"""

# (compute capability, query heads per KV head, head size, cache dtype): tile, warps, stages, programs per SM
DECODE: dict[tuple[int, int, int, str], tuple[int, int, int, int]] = {}

# (compute capability, head size, cache dtype, whether chunks have many rows): rows, tile, warps, stages
PREFILL: dict[tuple[int, int, str, bool], tuple[int, int, int, int]] = {}
