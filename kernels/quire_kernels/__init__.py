"""One op a file: a public function that picks by device, and its torch reference beside it.

The reference is the specification: plain, in float32, and the oracle of every faster version. Tensors are
packed (`[tokens, ...]`), KV caches are `[num_blocks, kv_heads, block_size, head_size]` per layer, with scales
beside them where they hold a byte an element.
"""

from quire_kernels.add_rmsnorm import add_rmsnorm
from quire_kernels.add_rmsnorm_fp8 import add_rmsnorm_fp8
from quire_kernels.block_copy import host_pool, load_blocks, save_blocks
from quire_kernels.fp8_linear import fp8_linear, fp8_product
from quire_kernels.fp8_quantize import fp8_quantize
from quire_kernels.gelu_tanh_mul import gelu_tanh_mul
from quire_kernels.group_rows import group_rows
from quire_kernels.gumbel_sample import gumbel_sample
from quire_kernels.int8_linear import Int8Weight, int8_linear, pack_int8, quantise_int8
from quire_kernels.kv_quantization import KVScales, is_quantized_kv, kv_row_size, open_kv_cache
from quire_kernels.logprobs import token_logprobs
from quire_kernels.lora import add_lora
from quire_kernels.moe import moe
from quire_kernels.native import NATIVE
from quire_kernels.paged_decode_attention import DecodeGather, decode_gather, paged_decode_attention
from quire_kernels.paged_prefill_attention import PrefillSpan, paged_prefill_attention, prefill_spans
from quire_kernels.paged_verify_attention import paged_verify_attention
from quire_kernels.penalties import apply_penalties
from quire_kernels.recording import Recording, record
from quire_kernels.rope_kv_write import kv_cache_rows, rope_kv_write
from quire_kernels.row_groups import RowGroups
from quire_kernels.silu_mul import silu_mul
from quire_kernels.silu_mul_fp8 import silu_mul_fp8
from quire_kernels.take_rows import take_rows
from quire_kernels.token_bitmask import apply_token_bitmask
from quire_kernels.topk_topp_threshold import topk_topp_threshold
from quire_kernels.w4a16 import w4a16
from quire_kernels.w4a16_packing import W4Weight, repack_awq, repack_gptq, repack_packed
from quire_kernels.w8a8 import w8a8

__all__ = [
    "DecodeGather",
    "Int8Weight",
    "KVScales",
    "NATIVE",
    "PrefillSpan",
    "Recording",
    "RowGroups",
    "W4Weight",
    "add_lora",
    "add_rmsnorm",
    "add_rmsnorm_fp8",
    "apply_penalties",
    "apply_token_bitmask",
    "decode_gather",
    "fp8_linear",
    "fp8_product",
    "fp8_quantize",
    "gelu_tanh_mul",
    "group_rows",
    "gumbel_sample",
    "host_pool",
    "int8_linear",
    "is_quantized_kv",
    "kv_cache_rows",
    "kv_row_size",
    "load_blocks",
    "moe",
    "open_kv_cache",
    "pack_int8",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_verify_attention",
    "prefill_spans",
    "quantise_int8",
    "record",
    "repack_awq",
    "repack_gptq",
    "repack_packed",
    "rope_kv_write",
    "save_blocks",
    "silu_mul",
    "silu_mul_fp8",
    "take_rows",
    "token_logprobs",
    "topk_topp_threshold",
    "w4a16",
    "w8a8",
]
