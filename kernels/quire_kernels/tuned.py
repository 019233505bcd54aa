"""What the sweep of `make bench-gpu`, which rewrites this file, found fastest. Read by the attention kernels;
where there is no entry, as for a GPU that nobody has measured, their own choice holds.
"""

# (compute capability, query heads a KV head, head size, cache): tile, warps, stages, programs on a processor
DECODE: dict[tuple[int, int, int, str], tuple[int, int, int, int]] = {}

# (compute capability, head size, cache, whether a chunk has many rows): rows, tile, warps, stages
PREFILL: dict[tuple[int, int, str, bool], tuple[int, int, int, int]] = {}
