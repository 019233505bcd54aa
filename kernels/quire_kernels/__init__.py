"""The ops of the inference engine, and their torch references.

Each op is one file: a public function that dispatches by device, and a plain torch reference, which is its
specification and what every faster implementation is tested against. The op's Triton kernel is in
`<op>_triton.py` beside it, its C kernel in `cpu/`. Tensors are packed (`[tokens, ...]`); for the layout of
the KV cache see `paged_kv_cache`.
"""

from quire_kernels.activation.gelu_tanh_mul import gelu_tanh_mul
from quire_kernels.activation.silu_mul import silu_mul
from quire_kernels.activation.silu_mul_fp8 import silu_mul_fp8
from quire_kernels.attention.bidirectional_attention import bidirectional_attention
from quire_kernels.attention.paged_decode_attention import DecodeGather, decode_gather, paged_decode_attention
from quire_kernels.attention.paged_prefill_attention import (
    PrefillSpan,
    paged_prefill_attention,
    prefill_spans,
)
from quire_kernels.attention.paged_verify_attention import paged_verify_attention
from quire_kernels.attention.rope_kv_write import kv_cache_rows, rope_kv_write
from quire_kernels.block_copy import BlockBuffer, host_pool, load_blocks, save_blocks
from quire_kernels.cpu.native import NATIVE
from quire_kernels.cpu.recording import Recording, record
from quire_kernels.cpu.shm_group import CollectiveError
from quire_kernels.lora.add_lora import add_lora
from quire_kernels.lora.host_lora import HostLora
from quire_kernels.moe.group_rows import group_rows
from quire_kernels.moe.moe import moe
from quire_kernels.moe.row_groups import RowGroups
from quire_kernels.norm.add_rmsnorm import add_rmsnorm
from quire_kernels.norm.add_rmsnorm_fp8 import add_rmsnorm_fp8
from quire_kernels.one_shot_all_reduce import one_shot_all_reduce
from quire_kernels.one_shot_place import OneShotPlace, can_one_shot, one_shot_region_bytes
from quire_kernels.paged_kv_cache import (
    KVCache,
    KVScales,
    PagedKVCache,
    is_quantized_kv,
    kv_row_size,
    open_kv_cache,
)
from quire_kernels.quantization.fp8_linear import fp8_linear, fp8_product
from quire_kernels.quantization.fp8_quantize import fp8_quantize
from quire_kernels.quantization.int4_linear import Int4Weight, int4_linear, quantise_int4, repack_int4
from quire_kernels.quantization.int8_linear import Int8Weight, int8_linear, pack_int8, quantise_int8
from quire_kernels.quantization.w4a16 import w4a16
from quire_kernels.quantization.w4a16_packing import W4Weight, repack_awq, repack_gptq, repack_packed
from quire_kernels.quantization.w8a8 import w8a8
from quire_kernels.sampling.apply_penalties import apply_penalties
from quire_kernels.sampling.apply_token_bitmask import apply_token_bitmask
from quire_kernels.sampling.gumbel_sample import gumbel_sample
from quire_kernels.sampling.largest import largest, largest_pair
from quire_kernels.sampling.sample_tokens import draw_tokens, sample_tokens
from quire_kernels.sampling.token_logprobs import token_logprobs
from quire_kernels.sampling.topk_topp_threshold import topk_topp_threshold
from quire_kernels.shm_collectives import (
    ShmGroup,
    create_shm_region,
    has_shm_collectives,
    shm_all_reduce,
    shm_gather,
)
from quire_kernels.take_rows import take_partial_rows, take_rows

__all__ = [
    "BlockBuffer",
    "CollectiveError",
    "DecodeGather",
    "HostLora",
    "Int4Weight",
    "Int8Weight",
    "KVCache",
    "KVScales",
    "NATIVE",
    "OneShotPlace",
    "PagedKVCache",
    "PrefillSpan",
    "Recording",
    "RowGroups",
    "ShmGroup",
    "W4Weight",
    "add_lora",
    "add_rmsnorm",
    "add_rmsnorm_fp8",
    "apply_penalties",
    "apply_token_bitmask",
    "bidirectional_attention",
    "can_one_shot",
    "create_shm_region",
    "decode_gather",
    "draw_tokens",
    "fp8_linear",
    "fp8_product",
    "fp8_quantize",
    "gelu_tanh_mul",
    "group_rows",
    "gumbel_sample",
    "has_shm_collectives",
    "host_pool",
    "int4_linear",
    "int8_linear",
    "is_quantized_kv",
    "kv_cache_rows",
    "kv_row_size",
    "largest",
    "largest_pair",
    "load_blocks",
    "moe",
    "one_shot_all_reduce",
    "one_shot_region_bytes",
    "open_kv_cache",
    "pack_int8",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_verify_attention",
    "prefill_spans",
    "quantise_int4",
    "quantise_int8",
    "record",
    "repack_awq",
    "repack_gptq",
    "repack_int4",
    "repack_packed",
    "rope_kv_write",
    "sample_tokens",
    "save_blocks",
    "shm_all_reduce",
    "shm_gather",
    "silu_mul",
    "silu_mul_fp8",
    "take_partial_rows",
    "take_rows",
    "token_logprobs",
    "topk_topp_threshold",
    "w4a16",
    "w8a8",
]
