"""Every configuration that the Triton kernels are compiled in. Imported by the ahead-of-time compile, the
docs and the tuning, and by nothing that serves.
"""

from quire_kernels import (
    add_rmsnorm_fp8_triton,
    add_rmsnorm_triton,
    fp8_quantize_triton,
    gelu_tanh_mul_triton,
    group_rows_triton,
    gumbel_sample_triton,
    lora_triton,
    moe_triton,
    paged_decode_attention_triton,
    penalties_triton,
    rope_kv_write_triton,
    silu_mul_fp8_triton,
    silu_mul_triton,
    sum_parts_triton,
    token_bitmask_triton,
    topk_topp_threshold_triton,
    w4_dequantize_triton,
    w4a16_triton,
)

CONFIGURATIONS = (
    *add_rmsnorm_triton.CONFIGURATIONS,
    *silu_mul_triton.CONFIGURATIONS,
    *gelu_tanh_mul_triton.CONFIGURATIONS,
    *rope_kv_write_triton.CONFIGURATIONS,
    *paged_decode_attention_triton.CONFIGURATIONS,
    *gumbel_sample_triton.CONFIGURATIONS,
    *topk_topp_threshold_triton.CONFIGURATIONS,
    *penalties_triton.CONFIGURATIONS,
    *token_bitmask_triton.CONFIGURATIONS,
    *fp8_quantize_triton.CONFIGURATIONS,
    *add_rmsnorm_fp8_triton.CONFIGURATIONS,
    *silu_mul_fp8_triton.CONFIGURATIONS,
    *sum_parts_triton.CONFIGURATIONS,
    *w4a16_triton.CONFIGURATIONS,
    *w4_dequantize_triton.CONFIGURATIONS,
    *group_rows_triton.CONFIGURATIONS,
    *moe_triton.CONFIGURATIONS,
    *lora_triton.CONFIGURATIONS,
)
