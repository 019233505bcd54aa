"""Paged attention of one layer: rotate queries and keys, write keys and values to the cache, attend."""

from functools import partial

import torch
from torch import Tensor

from quire_kernels import (
    KVCache,
    PagedKVCache,
    is_quantized_kv,
    kv_row_size,
    open_kv_cache,
    paged_decode_attention,
    paged_prefill_attention,
    paged_verify_attention,
    rope_kv_write,
)
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.layers.norm import RMSNorm

__all__ = ["Attention", "is_quantized_kv", "kv_row_size"]


class Attention:
    """Holds settings only; the cache belongs to the runner and is passed to each call.

    ``window``: a token sees this many positions: itself and those before it. ``softcap`` bounds the scores by
    tanh. ``norms``: of query and key heads, before the rotation. ``kv_scales``: of the checkpoint, for a
    cache of e4m3.
    """

    def __init__(
        self,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        kv_scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.scale, self.window, self.softcap, self.norms = scale, window, softcap, norms
        self.kv_scales = kv_scales

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch, kv_cache: Tensor
    ) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]. ``rotary``: cos and sin at the batch's positions."""
        cache = open_kv_cache(kv_cache, self.kv_scales)
        norms = None
        if self.norms is not None:
            q_norm, k_norm = self.norms
            norms = (q_norm.weight, k_norm.weight, q_norm.eps)
        q = rope_kv_write(
            qkv, *rotary, None, batch.slots, cache, norms=norms, cache_rows=batch.cache_rows
        )  # [T, Hq, D]
        attend = self._verify if batch.num_queries > 1 else self._attend
        return attend(q, batch, cache).flatten(1)

    def _verify(self, q: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """[T, Hq, D] of a batch in which all sequences have the same number of tokens, their last ones."""
        return paged_verify_attention(
            q.unflatten(0, (-1, batch.num_queries)),
            PagedKVCache(cache, batch.decode_table, batch.decode_lens),
            self.scale,
            window=self.window,
            softcap=self.softcap,
        ).flatten(0, 1)

    def _attend(self, q: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """[T, Hq, D]: decodes, then prompt chunks."""
        plan, split = batch.plans[self.window], batch.num_decodes
        decode = partial(
            paged_decode_attention,
            kv=PagedKVCache(cache, batch.decode_table, batch.decode_lens),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            gather=plan.decode_gather,
        )
        if split == q.shape[0]:
            return decode(q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if split:
            decode(q[:split], out=out[:split])
        paged_prefill_attention(
            q[split:],
            PagedKVCache(cache, batch.prefill_table, batch.prefill_lens),
            batch.prefill_bounds,
            self.scale,
            window=self.window,
            softcap=self.softcap,
            out=out[split:],
            spans=plan.prefill_spans,
            chunks=batch.prefill_chunks,
        )
        return out
