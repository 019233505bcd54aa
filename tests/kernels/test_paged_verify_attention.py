from typing import Any

import pytest
import torch

from quire_kernels.paged_verify_attention import paged_verify_attention, paged_verify_attention_reference
from tests.kernels.paged import HEADS, SIZE, VARIANTS, cache


@pytest.mark.parametrize("more", [{}, *VARIANTS], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_it_equals_its_reference(queries: int, more: dict[str, Any]) -> None:
    k_cache, v_cache, table, seq_lens = cache([9, 3, 17])
    q = torch.randn(3, queries, HEADS, SIZE)
    result = paged_verify_attention(q, k_cache, v_cache, table, seq_lens, 0.3, **more)
    expected = paged_verify_attention_reference(q, k_cache, v_cache, table, seq_lens, 0.3, **more)
    torch.testing.assert_close(result, expected)


def test_each_leaf_of_a_tree_sees_what_it_would_see_alone() -> None:
    """Two drafts of two tokens after one that both follow, beside each draft for itself."""
    k_cache, v_cache, table, seq_lens = cache([12])
    q = torch.randn(1, 5, HEADS, SIZE)  # tokens 7 to 11: the root, its two children, a child of each
    tree = torch.tensor([[0b00001, 0b00011, 0b00101, 0b01011, 0b10101]])
    out = torch.empty_like(q)
    result = paged_verify_attention(q, k_cache, v_cache, table, seq_lens, 0.3, tree=tree, out=out)
    assert result is out
    order = torch.arange(5)
    for path in ([0, 1, 3], [0, 2, 4]):
        k, v = k_cache.clone(), v_cache.clone()
        for place, node in zip((7, 8, 9), path, strict=True):
            to, taken = (table[0, place // 4], place % 4), (table[0, (7 + node) // 4], (7 + node) % 4)
            k[to[0], :, to[1]] = k_cache[taken[0], :, taken[1]]
            v[to[0], :, to[1]] = v_cache[taken[0], :, taken[1]]
        alone = paged_verify_attention(q[:, order[path]], k, v, table, torch.tensor([10]), 0.3)
        torch.testing.assert_close(result[:, path], alone)
