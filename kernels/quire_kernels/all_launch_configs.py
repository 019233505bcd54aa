"""Launch configs of every Triton kernel: what `bench.aot` compiles and docs/kernels.md shows.

Importing it imports triton, so no serving code does.
"""

from quire_kernels import block_copy_triton, one_shot_all_reduce_triton, sum_parts_triton
from quire_kernels.activation import gelu_tanh_mul_triton, silu_mul_fp8_triton, silu_mul_triton
from quire_kernels.attention import (
    bidirectional_attention_triton,
    paged_decode_attention_triton,
    paged_prefill_attention_triton,
    paged_verify_attention_triton,
    rope_kv_write_triton,
)
from quire_kernels.lora import add_lora_triton
from quire_kernels.moe import group_rows_triton, moe_triton
from quire_kernels.norm import add_rmsnorm_fp8_triton, add_rmsnorm_triton
from quire_kernels.quantization import fp8_quantize_triton, w4_dequantize_triton, w4a16_triton, w8a8_triton
from quire_kernels.sampling import (
    apply_penalties_triton,
    apply_token_bitmask_triton,
    gumbel_sample_triton,
    topk_topp_threshold_triton,
)

LAUNCH_CONFIGS = (
    *add_rmsnorm_triton.LAUNCH_CONFIGS,
    *silu_mul_triton.LAUNCH_CONFIGS,
    *gelu_tanh_mul_triton.LAUNCH_CONFIGS,
    *rope_kv_write_triton.LAUNCH_CONFIGS,
    *paged_decode_attention_triton.LAUNCH_CONFIGS,
    *gumbel_sample_triton.LAUNCH_CONFIGS,
    *topk_topp_threshold_triton.LAUNCH_CONFIGS,
    *apply_penalties_triton.LAUNCH_CONFIGS,
    *apply_token_bitmask_triton.LAUNCH_CONFIGS,
    *fp8_quantize_triton.LAUNCH_CONFIGS,
    *add_rmsnorm_fp8_triton.LAUNCH_CONFIGS,
    *silu_mul_fp8_triton.LAUNCH_CONFIGS,
    *sum_parts_triton.LAUNCH_CONFIGS,
    *w4a16_triton.LAUNCH_CONFIGS,
    *w4_dequantize_triton.LAUNCH_CONFIGS,
    *w8a8_triton.LAUNCH_CONFIGS,
    *group_rows_triton.LAUNCH_CONFIGS,
    *moe_triton.LAUNCH_CONFIGS,
    *add_lora_triton.LAUNCH_CONFIGS,
    *paged_prefill_attention_triton.LAUNCH_CONFIGS,
    *paged_verify_attention_triton.LAUNCH_CONFIGS,
    *bidirectional_attention_triton.LAUNCH_CONFIGS,
    *block_copy_triton.LAUNCH_CONFIGS,
    *one_shot_all_reduce_triton.LAUNCH_CONFIGS,
)
