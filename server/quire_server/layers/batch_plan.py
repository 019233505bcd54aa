"""What the CPU kernels want to know once per step instead of once per layer. Called by ``runner.batch``."""

from quire_kernels import DecodeGather, PrefillSpan, decode_gather, kv_cache_rows, prefill_spans

__all__ = ["DecodeGather", "PrefillSpan", "decode_gather", "kv_cache_rows", "prefill_spans"]
