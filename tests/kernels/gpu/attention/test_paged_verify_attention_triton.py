"""Verification attention in Triton, of linear drafts and of trees, equals its float32 reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.attention.paged_decode_attention_triton import paged_decode_attention_triton
from quire_kernels.attention.paged_verify_attention import (
    paged_verify_attention,
    paged_verify_attention_reference,
)
from quire_kernels.attention.paged_verify_attention_triton import paged_verify_attention_triton
from quire_kernels.attention.split_kv_attention_triton import row_block
from tests.kernels.gpu.attention.paged_caches import CACHES, DTYPES, bound_of, paged_kv_cache, rows
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor
from tests.kernels.gpu.tolerances import assert_near

FACTORS: dict[str, Any] = {
    "queries": [4, 1, 2, 5, 9],
    "before": [[0], [1, 248, None, 3], [114, 60], [12, 0, 100]],  # tokens before the new ones; None: padding
    "kv_heads": [1, 2],
    "group": [4, 3, 1, 8],
    "size": [64, 80, 96, 128, 256],
    "block": [16, 64],
    "dtype": DTYPES,
    "cache": CACHES,
    "splits": [1, 4, 32],
    "more": [{}, {"window": 70}, {"softcap": 2.0}, {"window": 9, "softcap": 1.0}],
    "is_tree": [False, True],
    "is_full": [False, True],
}


def trees(sequences: int, queries: int, device: str) -> Tensor:
    """Random draft trees, i64 [sequences, queries]: each parent is an earlier new token or none."""
    masks = torch.zeros(sequences, queries, dtype=torch.int64)
    for row in range(sequences):
        for token in range(queries):
            parent = int(torch.randint(-1, token, ())) if token else -1
            own = 1 << token
            masks[row, token] = (own - (1 << 64) if token == 63 else own) | (
                int(masks[row, parent]) if parent >= 0 else 0
            )
    return masks.to(device)


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    dtype, cache, heads = case["dtype"], case["cache"], case["kv_heads"] * case["group"]
    kv_heads, size, block, queries = (case[name] for name in ("kv_heads", "size", "block", "queries"))
    lengths = [0 if before is None else before + queries for before in case["before"]]
    kv = paged_kv_cache(lengths, kv_heads, size, block, cache or dtype, device, is_full=case["is_full"])
    q = rows(len(lengths) * queries, heads, size, dtype, device).unflatten(0, (len(lengths), queries))
    whole, out = output_in_wider_tensor(q, -2)
    tree = trees(len(lengths), queries, device) if case["is_tree"] else None
    arguments = (q, kv, size**-0.5)
    expected = paged_verify_attention_reference(*arguments, **case["more"], tree=tree)
    paged_verify_attention_triton(
        *arguments, **case["more"], tree=tree, splits=case["splits"], tile=32, out=out
    )
    assert is_surrounding_untouched(whole, -2)
    assert_near(out, expected, **bound_of(dtype, cache))


@pytest.mark.parametrize("queries", [pytest.param(64, marks=pytest.mark.kernels), 33])
def test_more_rows_than_a_program_holds_are_more_programs(queries: int, device: str) -> None:
    kv = paged_kv_cache([queries + 40], 1, 64, 16, torch.float32, device)
    q, tree = torch.randn(1, queries, 4, 64, device=device), trees(1, queries, device)
    given = paged_verify_attention_triton(q, kv, 0.1, tree=tree, splits=2)
    expected = paged_verify_attention_reference(q, kv, 0.1, tree=tree)
    assert_near(given, expected)
    assert row_block(queries, 4) == 64 and row_block(2, 4) == 16 and row_block(5, 4) == 32


def test_a_draft_that_is_not_an_ancestor_has_no_effect(device: str) -> None:
    kv = paged_kv_cache([20], 1, 64, 16, torch.float32, device)
    q, tree = torch.randn(1, 3, 2, 64, device=device), torch.tensor([[0b001, 0b011, 0b101]], device=device)
    before = paged_verify_attention_triton(q, kv, 0.1, tree=tree)
    kv.cache.keys[kv.block_table[0, 1], 0, 2] += 1  # the second of the three
    after = paged_verify_attention_triton(q, kv, 0.1, tree=tree)
    assert torch.equal(before[0, [0, 2]], after[0, [0, 2]]) and not torch.equal(before[0, 1], after[0, 1])


def test_each_new_token_has_a_window_of_its_own(device: str) -> None:
    kv = paged_kv_cache([40], 1, 64, 16, torch.float32, device)
    q = torch.randn(1, 3, 2, 64, device=device)  # tokens 37, 38 and 39
    before = paged_verify_attention_triton(q, kv, 0.1, window=5)
    kv.cache.keys[kv.block_table[0, 2], 0, 1] += 1  # token 33
    after = paged_verify_attention_triton(q, kv, 0.1, window=5)
    assert torch.equal(before[0, 1:], after[0, 1:]) and not torch.equal(before[0, 0], after[0, 0])


def test_one_new_token_equals_decode(device: str) -> None:
    kv = paged_kv_cache([33, 100], 2, 64, 16, torch.bfloat16, device)
    q = torch.randn(2, 6, 64, device=device).bfloat16()
    decoded = paged_decode_attention_triton(q, kv, 0.1, splits=2)
    verified = paged_verify_attention_triton(q[:, None], kv, 0.1, splits=2)
    assert torch.equal(decoded, verified[:, 0])


def test_trees_that_do_not_fit_are_refused() -> None:
    kv = paged_kv_cache([80], 1, 64, 16, torch.float32, "cpu")
    arguments = (kv, 0.1)
    with pytest.raises(ValueError, match="65 tokens of a tree exceed 64"):
        tree = torch.zeros(1, 65, dtype=torch.int64)
        paged_verify_attention(torch.randn(1, 65, 2, 64), *arguments, tree=tree)
    with pytest.raises(ValueError, match="the window, 3"):
        tree = torch.zeros(1, 4, dtype=torch.int64)
        paged_verify_attention(torch.randn(1, 4, 2, 64), *arguments, tree=tree, window=3)
    with pytest.raises(ValueError, match="int64"):
        paged_verify_attention(torch.randn(1, 4, 2, 64), *arguments, tree=tree.int())
