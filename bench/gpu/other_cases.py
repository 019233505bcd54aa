"""What `roofline` measures of all but attention: ceilings, kernels of single rows, sampling, products."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import Case
from bench.gpu.place import Launch
from bench.gpu.sizes import Sizes
from quire_kernels import (
    add_lora,
    add_rmsnorm,
    add_rmsnorm_fp8,
    apply_penalties,
    apply_token_bitmask,
    fp8_quantize,
    group_rows,
    gumbel_sample,
    host_pool,
    moe,
    open_kv_cache,
    rope_kv_write,
    silu_mul,
    silu_mul_fp8,
    topk_topp_threshold,
    w4a16,
)
from quire_kernels.quantization.w4a16_packing import pack_w4
from quire_server.runner.gpu.block_copies import BlockCopies
from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.gpu.device import Device
from tests.server.runner.gpu.fake_device import FakeDevice

_BF16 = torch.bfloat16
_GROUP, _RANK, _ADAPTERS, _CHOSEN = 64, 16, 8, 2
COPY, PRODUCT = "copy", "matrix product, bf16"  # the ceilings


def _rows(count: int, size: int, device: torch.device, dtype: torch.dtype = _BF16) -> Tensor:
    return torch.randn(count, size, dtype=dtype, device=device)


def ceilings(sizes: Sizes) -> list[Case]:
    """The fastest that this GPU moves and multiplies."""

    def copy(device: torch.device) -> Launch:
        source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def product(device: torch.device) -> Launch:
        a, b = (_rows(sizes.square, sizes.square, device) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return [
        Case(COPY, copy, 2 * sizes.copied),
        Case(PRODUCT, product, 0, 2 * sizes.square**3, sets=2),
    ]


def _by_row(sizes: Sizes) -> list[Case]:
    tokens, hidden, inner = sizes.tokens, sizes.hidden, sizes.inner

    def norm(op: Callable[..., object], device: torch.device) -> Launch:
        x, residual, weight = (
            _rows(tokens, hidden, device),
            _rows(tokens, hidden, device),
            _rows(1, hidden, device),
        )
        return lambda: op(x, residual, weight[0], 1e-5)

    def gated(op: Callable[..., object], device: torch.device) -> Launch:
        x = _rows(tokens, 2 * inner, device)
        return lambda: op(x)

    def quantize(device: torch.device) -> Launch:
        x = _rows(tokens, hidden, device)
        return lambda: fp8_quantize(x)

    return [
        Case(f"add_rmsnorm, {tokens} x {hidden}", partial(norm, add_rmsnorm), 8 * tokens * hidden),
        Case(f"add_rmsnorm_fp8, {tokens} x {hidden}", partial(norm, add_rmsnorm_fp8), 7 * tokens * hidden),
        Case(f"silu_mul, {tokens} x {inner}", partial(gated, silu_mul), 6 * tokens * inner),
        Case(f"silu_mul_fp8, {tokens} x {inner}", partial(gated, silu_mul_fp8), 5 * tokens * inner),
        Case(f"fp8_quantize, {tokens} x {hidden}", quantize, 3 * tokens * hidden),
    ]


def _rope(sizes: Sizes) -> Case:
    tokens, head = sizes.tokens, sizes.head
    width = (sizes.q_heads + 2 * sizes.kv_heads) * head

    def make(device: torch.device) -> Launch:
        qkv = _rows(tokens, width, device)
        cos, sin = (_rows(tokens, head // 2, device, torch.float32) for _ in range(2))
        blocks = -(-tokens // sizes.block)
        cache = open_kv_cache(
            torch.empty(2, blocks, sizes.kv_heads, sizes.block, head, dtype=_BF16, device=device)
        )
        slots = torch.arange(tokens, device=device)
        return lambda: rope_kv_write(qkv, cos, sin, None, slots, cache)

    moved = 2 * 2 * tokens * width + 4 * tokens * head
    return Case(f"rope_kv_write, {tokens} tokens, {sizes.q_heads}/{sizes.kv_heads} heads", make, moved)


def _sampling(sizes: Sizes) -> list[Case]:
    rows, vocab = sizes.rows, sizes.vocab

    def each(device: torch.device, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    def gumbel(device: torch.device) -> Launch:
        logits, ids = _rows(rows, vocab, device, torch.float32), torch.arange(rows, device=device)
        temperature = each(device, 0.8)
        return lambda: gumbel_sample(logits, temperature, ids, ids)

    def threshold(device: torch.device) -> Launch:
        logits = _rows(rows, vocab, device, torch.float32)
        top_k, top_p = each(device, 50, torch.int64), each(device, 0.9)
        return lambda: topk_topp_threshold(logits, top_k, top_p)

    def penalties(device: torch.device) -> Launch:
        logits = _rows(rows, vocab, device, torch.float32)
        tokens = torch.randint(vocab, (rows, 1024), device=device)
        order, half = torch.arange(rows, device=device), each(device, 512, torch.int64)
        repetition, presence = each(device, 1.2), each(device, 0.5, torch.float64)
        return lambda: apply_penalties(
            logits, tokens, order, half, 2 * half, repetition, presence, presence, out=logits
        )

    def bitmask(device: torch.device) -> Launch:
        logits = _rows(rows, vocab, device, torch.float32)
        masks = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=device)
        order = torch.arange(rows, device=device)
        return lambda: apply_token_bitmask(logits, masks, order, out=logits)

    moved, what = 4 * rows * vocab, f"{rows} x {vocab}"
    return [
        Case(f"gumbel_sample, {what}", gumbel, moved),
        Case(f"topk_topp_threshold, {what}", threshold, moved),
        Case(f"penalties, contexts of 1024, {what}", penalties, 2 * moved),
        Case(f"token_bitmask, {what}", bitmask, 2 * moved),
    ]


def _products(sizes: Sizes) -> list[Case]:
    inputs, outputs = sizes.hidden, 2 * sizes.inner

    def dense(rows: int, device: torch.device) -> Launch:
        x, weight = _rows(rows, inputs, device), _rows(outputs, inputs, device)
        return lambda: functional.linear(x, weight)

    def four_bits(rows: int, device: torch.device) -> Launch:
        groups = inputs // _GROUP
        values = torch.randint(16, (inputs, outputs), dtype=torch.uint8, device=device)
        zeros = torch.full((groups, outputs), 8, device=device)
        weight, x = pack_w4(values, zeros, _rows(groups, outputs, device)), _rows(rows, inputs, device)
        return lambda: w4a16(x, weight)

    found = []
    for rows in (1, 16, 64):
        flops, what = 2 * rows * inputs * outputs, f"{rows} x {inputs} x {outputs}"
        found.append(Case(f"cuBLAS, bf16, {what}", partial(dense, rows), 2 * inputs * outputs, flops))
        moved = inputs * outputs // 2 + 3 * inputs // _GROUP * outputs
        found.append(Case(f"w4a16, groups of {_GROUP}, {what}", partial(four_bits, rows), moved, flops))
    return found


def _grouped(sizes: Sizes) -> list[Case]:
    count, hidden, inner = sizes.experts
    tokens = sizes.rows

    def experts(device: torch.device) -> Launch:
        x, likes = _rows(tokens, hidden, device), _rows(tokens, count, device)
        gate_up = torch.randn(count, 2 * inner, hidden, dtype=_BF16, device=device)
        down = torch.randn(count, hidden, inner, dtype=_BF16, device=device)
        return lambda: moe(x, likes, gate_up, down, _CHOSEN, normalises=True)

    def adapters(device: torch.device) -> Launch:
        x, y = _rows(tokens, hidden, device), _rows(tokens, hidden, device)
        a = torch.randn(_ADAPTERS, _RANK, hidden, dtype=_BF16, device=device)
        b = torch.randn(_ADAPTERS, hidden, _RANK, dtype=_BF16, device=device)
        of = (torch.arange(tokens, device=device) % _ADAPTERS).to(torch.int32)
        groups = group_rows(of, _ADAPTERS, 16)
        return lambda: add_lora(y, x, a, b, groups, (hidden,))

    reached = min(count, tokens * _CHOSEN)
    return [
        Case(
            f"moe, {tokens} tokens, {_CHOSEN} of {count} experts, {hidden} x {inner}",
            experts,
            6 * reached * hidden * inner,
            6 * tokens * _CHOSEN * hidden * inner,
            sets=1,
        ),
        Case(
            f"add_lora, {tokens} tokens, {_ADAPTERS} adapters of rank {_RANK}",
            adapters,
            4 * _ADAPTERS * _RANK * hidden + 6 * tokens * hidden,
        ),
    ]


def _swaps(sizes: Sizes) -> list[Case]:
    """Blocks to and from pinned memory of the host."""
    blocks, layers = 64, 4

    def make(name: str, device: torch.device) -> Launch:
        shape = (2, blocks, sizes.kv_heads, sizes.block, sizes.head)
        caches = [torch.zeros(shape, dtype=_BF16, device=device) for _ in range(layers)]
        gpu: Device = CudaDevice() if device.type == "cuda" else FakeDevice()
        copies = BlockCopies(caches, host_pool(caches, blocks), gpu)
        pairs = [(block, blocks - 1 - block) for block in range(blocks)]

        def launch() -> None:
            for each in (copies.save if name == "save" else copies.load)(pairs):
                each.wait()

        return launch

    moved = 4 * blocks * layers * sizes.kv_heads * sizes.block * sizes.head
    return [
        Case(
            f"{name}_blocks, {blocks} blocks of {layers} layers",
            partial(make, name),
            moved,
            graph=False,
            sets=1,
        )
        for name in ("save", "load")
    ]


def cases(sizes: Sizes) -> list[Case]:
    """All of them."""
    return [
        *_by_row(sizes), _rope(sizes), *_sampling(sizes), *_products(sizes), *_grouped(sizes), *_swaps(sizes),
    ]  # fmt: skip
