"""Repacks 4-bit weights from the layouts of checkpoints into the layout that `w4a16` reads.

AWQ, GPTQ and compressed-tensors all define W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group, and
differ in how they pack q and z into words. Here a byte holds two rows of the same group that are half a group
apart: one load gives two operands of the matrix product, each a run of adjacent rows, and no byte is loaded
twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = (128, 64, 32)  # group sizes (rows that share a scale) that the kernel supports
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of column j in a word


@dataclass(frozen=True, slots=True)
class W4Weight:
    """``packed`` u8 [K / 2, N]: byte g * group / 2 + r holds row g * group + r in its low four bits, and row
    g * group + group / 2 + r in its high four bits. ``scales`` [K / group, N] in the checkpoint's float
    dtype, ``zeros`` u8 [K / group, N]. ``order`` i64 [K]: row k multiplies input order[k]; None: input k.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        return self.packed.shape[0] * 2, self.packed.shape[1]


def pack_w4(values: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> W4Weight:
    """values [K, N] in 0 to 15; zeros in 0 to 16 and scales, both [K / size, N] for any group size."""
    inputs, outputs = values.shape
    size = inputs // scales.shape[0]
    group = next((group for group in GROUPS if size % group == 0), None)
    if group is None or size * scales.shape[0] != inputs or scales.shape != zeros.shape:
        raise ValueError(
            f"pack_w4: {scales.shape[0]} groups of {inputs} inputs: each must be a multiple of {GROUPS[-1]}"
        )
    repeats = size // group
    low, high = values.to(torch.uint8).view(-1, 2, group // 2, outputs).unbind(1)
    return W4Weight(
        (low | high << 4).flatten(0, 1).contiguous(),
        scales.repeat_interleave(repeats, 0),
        zeros.to(torch.uint8).repeat_interleave(repeats, 0),
        group,
        order,
    )


def repack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> W4Weight:
    """AutoAWQ's "gemm": qweight i32 [K, N / 8], qzeros i32 [groups, N / 8], scales [groups, N]."""
    return pack_w4(_unpack(qweight, _AWQ_ORDER), _unpack(qzeros, _AWQ_ORDER), scales)


def repack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, zero_offset: int) -> W4Weight:
    """AutoGPTQ's: qweight i32 [K / 8, N], qzeros i32 [groups, N / 8], scales [groups, N], g_idx i32 [K].

    The zero point is the stored one plus ``zero_offset``: 1, or 0 in "gptq_v2". With desc_act, rows are in
    the order of activation size; they are sorted by group here, and the inputs are reordered at run time.
    """
    values = _unpack(qweight.T).T
    groups, inputs = scales.shape[0], values.shape[0]
    order = torch.sort(g_idx.long(), stable=True).indices
    if not torch.equal(g_idx.long()[order], torch.arange(inputs, device=order.device) // (inputs // groups)):
        raise ValueError(f"repack_gptq: g_idx must name each of {groups} groups {inputs // groups} times")
    plain = torch.equal(order, torch.arange(inputs, device=order.device))
    return pack_w4(
        values if plain else values[order],
        _unpack(qzeros) + zero_offset,
        scales,
        None if plain else order,
    )


def repack_packed(weight_packed: Tensor, weight_scale: Tensor, zero_point: Tensor | None) -> W4Weight:
    """compressed-tensors' "pack-quantized" of 4 bits: weight_packed i32 [N, K / 8], weight_scale [N, groups],
    weight_zero_point i32 [ceil(N / 8), groups] or None for symmetric quantization.
    """
    scales = weight_scale.T.contiguous()
    if zero_point is None:
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=scales.device)
    else:
        zeros = _unpack(zero_point.T)[:, : scales.shape[1]]
    return pack_w4(_unpack(weight_packed).T, zeros, scales)


def w4_dequantize(weight: W4Weight) -> Tensor:
    """Dequantized weights, f32 [K, N], rows in the order of the inputs."""
    inputs, outputs = weight.shape
    halves = weight.packed.view(-1, 1, weight.group // 2, outputs)
    values = torch.cat((halves & 15, halves >> 4), dim=1).view(-1, weight.group, outputs)
    centred = values.float() - weight.zeros[:, None].float()
    rows = (centred * weight.scales[:, None].float()).view(inputs, outputs)
    if weight.order is None:
        return rows
    return torch.empty_like(rows).index_copy_(0, weight.order, rows)


def _unpack(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """i32 [R, C] -> u8 [R, 8 C]; value j of a word is its field order[j], counted from the low bits."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
    return (words[:, :, None] >> shifts & 15).to(torch.uint8).flatten(1)
