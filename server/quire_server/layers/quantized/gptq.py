"""GPTQ, 4 bit: the checkpoint format of AutoGPTQ and GPTQModel.

For W [in, out], groups of rows share a scale and a zero: W[k, n] = (q[k, n] - z[g[k], n]) * s[g[k], n].

* ``qweight`` i32 [in / 8, out]: eight rows a word, the first in the lowest bits.
* ``qzeros`` i32 [groups, out / 8]: eight columns a word; z is the stored value + 1, or itself in "gptq_v2".
* ``scales`` float [groups, out].
* ``g_idx`` i32 [in]: g, which is k // group_size unless the rows were sorted by activation (desc_act).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels import W4Weight, repack_gptq
from quire_server.errors import ModelCorruptError
from quire_server.layers.quantized.format import REMEDY, TensorSpec, divide, unpack


@dataclass(frozen=True, slots=True)
class GPTQ:
    """``has_act_order``: rows may be assigned to groups in any way. ``group_size`` None: one group."""

    group_size: int | None
    has_act_order: bool = False
    zero_offset: int = 1  # 0 in gptq_v2

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """qweight, qzeros, scales, g_idx."""
        groups = divide(name, "inputs", in_size, self.group_size or in_size)
        words = divide(name, "outputs", out_size, 8)
        return {
            "qweight": TensorSpec((in_size // 8, out_size), torch.int32),
            "qzeros": TensorSpec((groups, words), torch.int32),
            "scales": TensorSpec((groups, out_size), torch.float32),
            "g_idx": TensorSpec((in_size,), torch.int32),
        }

    @property
    def granularity(self) -> tuple[int, int | None]:
        """A word holds eight inputs, or the zeros of eight outputs. Inputs that are assigned to groups in any
        order need the scales of all groups.
        """
        return 8, None if self.has_act_order else math.lcm(8, self.group_size or 1)

    def four_bits(self, name: str, tensors: Mapping[str, Tensor]) -> W4Weight:
        """The kernel's form of the matrix; ValueError if the groups differ in size."""
        qweight, qzeros, scales = (tensors[each] for each in ("qweight", "qzeros", "scales"))
        return repack_gptq(qweight, qzeros, scales, self._groups(name, tensors), self.zero_offset)

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in]."""
        scales, groups = tensors["scales"], self._groups(name, tensors)
        quantized = unpack(tensors["qweight"].T, 4)  # [out, in]
        zeros = unpack(tensors["qzeros"], 4) + self.zero_offset
        return (quantized - zeros.T[:, groups]).float() * scales.T[:, groups]

    def _groups(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Checked group index i64 [in]."""
        scales, groups = tensors["scales"], tensors["g_idx"].long()
        plain = torch.arange(groups.shape[0], device=groups.device) // (self.group_size or len(groups))
        if self.has_act_order:
            if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[0]:
                raise ModelCorruptError(
                    f"{name}.g_idx names a group beyond the {scales.shape[0]} there are. {REMEDY}"
                )
        elif not torch.equal(groups := groups - groups[0], plain):  # a shard begins with a later group
            raise ModelCorruptError(
                f"{name}.g_idx reorders the groups, and quantization_config says desc_act false. {REMEDY}"
            )
        return groups
