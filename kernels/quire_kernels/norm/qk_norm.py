"""RMS norm of every query and key head, in place, before the rotary embedding (Qwen 3, Gemma 3)."""

import torch
from torch import Tensor
from torch.nn import functional


def qk_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_kv_heads: int) -> None:
    """Normalize q and k of qkv [T, (Hq + 2 Hkv) D] over D; both weights are [D]. v is not changed."""
    if qkv.device.type != "cpu" or qkv.dtype != torch.float32:
        return qk_norm_reference(qkv, q_weight, k_weight, eps, num_kv_heads)
    q, k = _heads(qkv, q_weight.shape[0], num_kv_heads)
    for heads, weight in ((q, q_weight), (k, k_weight)):
        heads.copy_(functional.rms_norm(heads, weight.shape, weight, eps))
    return None


def qk_norm_reference(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_kv_heads: int) -> None:
    """In float32; a float32 weight is applied before the result is rounded, one of another dtype after."""
    q, k = _heads(qkv, q_weight.shape[0], num_kv_heads)
    for heads, weight in ((q, q_weight), (k, k_weight)):
        wide = heads.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        heads.copy_(weight * wide.to(weight.dtype))


def _heads(qkv: Tensor, head_size: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    heads = qkv.unflatten(1, (-1, head_size))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
