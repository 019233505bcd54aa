"""Every configuration that the Triton kernels are compiled in. Imported by the ahead-of-time compile, the
docs and the tuning, and by nothing that serves.
"""

from quire_kernels import (
    add_rmsnorm_triton,
    block_copy_triton,
    gelu_tanh_mul_triton,
    gumbel_sample_triton,
    paged_decode_attention_triton,
    paged_prefill_attention_triton,
    paged_verify_attention_triton,
    rope_kv_write_triton,
    silu_mul_triton,
    topk_topp_threshold_triton,
)

CONFIGURATIONS = (
    *add_rmsnorm_triton.CONFIGURATIONS,
    *silu_mul_triton.CONFIGURATIONS,
    *gelu_tanh_mul_triton.CONFIGURATIONS,
    *rope_kv_write_triton.CONFIGURATIONS,
    *paged_decode_attention_triton.CONFIGURATIONS,
    *gumbel_sample_triton.CONFIGURATIONS,
    *topk_topp_threshold_triton.CONFIGURATIONS,
    *paged_prefill_attention_triton.CONFIGURATIONS,
    *paged_verify_attention_triton.CONFIGURATIONS,
    *block_copy_triton.CONFIGURATIONS,
)
