"""Copies of KV blocks between the caches and a pool in the host's memory. Called by ``runner.tiers``."""

from quire_kernels import host_pool, load_blocks, save_blocks

__all__ = ["host_pool", "load_blocks", "save_blocks"]
