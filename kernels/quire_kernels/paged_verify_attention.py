"""Attention of the last few tokens of each sequence, the drafts of speculation among them, over its paged
cache. Meant for steps in which every sequence has as many new tokens; called once per layer by attention.
"""

import torch
from torch import Tensor

from quire_kernels.capped_attention import capped_scores
from quire_kernels.kv_quantization import KVScales, read_kv, with_scales
from quire_kernels.paged_prefill_attention import paged_prefill_attention

if torch.cuda.is_available():
    from quire_kernels.paged_verify_attention_triton import paged_verify_attention_triton

MAX_TREE = 64  # new tokens that a mask of 64 bits tells apart


def paged_verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    tree: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention for q [B, Q, Hq, D] -> [B, Q, Hq, D]: the last Q tokens of each sequence, already stored.

    ``seq_lens`` i64 [B] counts all of them. Each new token sees those before it; with ``tree`` i64 [B, Q] it
    sees what came before the new ones, and of the new ones those whose bits its number has: its own, bit 0
    for the first, and its ancestors' (Q <= 64, and no window shorter than Q). The rest as for decode.
    """
    check_tree(q, window, tree)
    if q.is_cuda:
        return paged_verify_attention_triton(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            scale,
            window=window,
            softcap=softcap,
            scales=scales,
            tree=tree,
            out=out,
        )
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    cache = (k_cache, v_cache, block_table, seq_lens)
    if tree is not None:
        return out.copy_(
            paged_verify_attention_reference(
                q, *cache, scale, window=window, softcap=softcap, scales=scales, tree=tree
            )
        )
    sequences, queries = q.shape[:2]
    paged_prefill_attention(
        q.flatten(0, 1),
        *cache,
        torch.arange(sequences + 1) * queries,
        scale,
        window=window,
        softcap=softcap,
        scales=scales,
        out=out.view(-1, *q.shape[2:]),
    )
    return out


def check_tree(q: Tensor, window: int | None, tree: Tensor | None) -> None:
    """Raise ValueError for a tree that 64 bits cannot tell, or whose ancestors a window would hide."""
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
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    tree: Tensor | None = None,
) -> Tensor:
    """One sequence at a time, in float32; a sequence of length 0 gives zeros."""
    num_kv_heads, _, head_size = k_cache.shape[1:]
    queries, number = q.shape[1], torch.arange(q.shape[1], device=q.device)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        keys, values = (
            read_kv(cache, scale, block_table[row])
            .transpose(0, 1)
            .reshape(num_kv_heads, 1, -1, head_size)[:, :, :length]
            for cache, scale in with_scales(k_cache, v_cache, scales)
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
