"""Paged attention of one layer: rotate, write to the cache, attend. Called by the models."""

import torch
from torch import Tensor

from quire_kernels import paged_decode_attention, paged_prefill_attention, rope_kv_write
from quire_server.layers.forward_batch import ForwardBatch


class Attention:
    """Holds shapes only; the cache belongs to the runner and comes with each call."""

    def __init__(self, head_size: int) -> None:
        self.scale = head_size**-0.5

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch, kv_cache: Tensor
    ) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]. ``rotary``: cos and sin of the batch's own positions."""
        k_cache, v_cache = kv_cache.unbind(0)
        q = rope_kv_write(
            qkv, *rotary, None, batch.slots, k_cache, v_cache, cache_rows=batch.cache_rows
        )  # [T, Hq, D]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        split = batch.num_decodes
        if split:
            paged_decode_attention(
                q[:split],
                k_cache,
                v_cache,
                batch.decode_table,
                batch.decode_lens,
                self.scale,
                out=out[:split],
                gather=batch.decode_gather,
            )
        if split < q.shape[0]:
            paged_prefill_attention(
                q[split:],
                k_cache,
                v_cache,
                batch.prefill_table,
                batch.prefill_lens,
                batch.prefill_bounds,
                self.scale,
                out=out[split:],
                spans=batch.prefill_spans,
            )
        return out.flatten(1)
