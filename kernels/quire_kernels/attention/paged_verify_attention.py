"""Verification attention for speculative decoding: the last Q tokens of each sequence.

For steps in which every sequence has the same number of new tokens. Reads the paged KV cache.
"""

import torch
from torch import Tensor

from quire_kernels.attention.paged_prefill_attention import paged_prefill_attention
from quire_kernels.attention.softcap import capped_scores
from quire_kernels.paged_kv_cache import PagedKVCache, read_kv

if torch.cuda.is_available():
    from quire_kernels.attention.paged_verify_attention_triton import paged_verify_attention_triton

MAX_TREE = 64  # new tokens that fit into a 64-bit mask


def paged_verify_attention(
    q: Tensor,
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    tree: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [B, Q, Hq, D] -> [B, Q, Hq, D]: the last Q tokens of each sequence, which are in the cache already.

    Each new token attends to all tokens before it. With ``tree`` i64 [B, Q] it attends to all tokens before
    the new ones, and to those new ones whose bits are set in its mask: itself and its ancestors in the draft
    tree; bit 0 is the first new token (Q <= 64, window >= Q). The other arguments as for decode.
    """
    check_tree(q, window, tree)
    if q.is_cuda:
        return paged_verify_attention_triton(q, kv, scale, window=window, softcap=softcap, tree=tree, out=out)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if tree is not None:
        return out.copy_(
            paged_verify_attention_reference(q, kv, scale, window=window, softcap=softcap, tree=tree)
        )
    sequences, queries = q.shape[:2]
    paged_prefill_attention(
        q.flatten(0, 1),
        kv,
        torch.arange(sequences + 1) * queries,
        scale,
        window=window,
        softcap=softcap,
        out=out.view(-1, *q.shape[2:]),
    )
    return out


def check_tree(q: Tensor, window: int | None, tree: Tensor | None) -> None:
    """Raise ValueError for a tree that exceeds 64 bits, or whose ancestors may lie outside of the window."""
    if tree is None:
        return
    queries = q.shape[1]
    if tree.shape != q.shape[:2] or tree.dtype != torch.int64 or not tree.is_contiguous():
        raise ValueError(f"paged_verify_attention: tree must be int64 [B, Q] in one piece: {tree.dtype}")
    if queries > MAX_TREE or (window is not None and window < queries):
        raise ValueError(
            f"paged_verify_attention: {queries} tokens of a tree exceed {MAX_TREE} or the window, {window}"
        )


def paged_verify_attention_reference(
    q: Tensor,
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    tree: Tensor | None = None,
) -> Tensor:
    """One sequence at a time, in float32; a sequence of length 0 gives zeros."""
    num_kv_heads, _, head_size = kv.cache.keys.shape[1:]
    queries, number = q.shape[1], torch.arange(q.shape[1], device=q.device)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(kv.seq_lens.tolist()):
        if length == 0:
            continue
        keys, values = (
            read_kv(data, scales, kv.block_table[row])
            .transpose(0, 1)
            .reshape(num_kv_heads, 1, -1, head_size)[:, :, :length]
            for data, scales in kv.cache.with_scales()
        )
        among_new = number[:, None] >= number
        if tree is not None:
            among_new = (tree[row, :, None] >> number) & 1 != 0
        before = torch.ones(queries, length - queries, dtype=torch.bool, device=q.device)
        visible = torch.cat((before, among_new), dim=1)
        if window is not None:
            depth = among_new.sum(-1) - 1
            place = torch.cat((torch.arange(length - queries, device=q.device), length - queries + depth))
            visible &= place > place[length - queries :, None] - window
        grouped = q[row].float().view(queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
        scores = capped_scores(grouped @ keys.transpose(2, 3) * scale, softcap)  # [Hkv, group, Q, length]
        attended = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ values
        out[row] = attended.permute(2, 0, 1, 3).reshape(queries, -1, head_size).to(q.dtype)
    return out
