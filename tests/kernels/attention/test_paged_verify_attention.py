from typing import Any

import pytest
import torch

from quire_kernels import KVCache, PagedKVCache
from quire_kernels.attention.paged_verify_attention import (
    paged_verify_attention,
    paged_verify_attention_reference,
)
from tests.kernels.attention.paged_batches import HEADS, SIZE, VARIANTS, paged_kv_cache


@pytest.mark.parametrize("more", [{}, *VARIANTS], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_it_equals_its_reference(queries: int, more: dict[str, Any]) -> None:
    kv = paged_kv_cache([9, 3, 17])
    q = torch.randn(3, queries, HEADS, SIZE)
    result = paged_verify_attention(q, kv, 0.3, **more)
    expected = paged_verify_attention_reference(q, kv, 0.3, **more)
    torch.testing.assert_close(result, expected)


def test_each_path_of_a_draft_tree_attends_as_if_it_were_alone() -> None:
    """A tree of two drafts of two tokens that share a root, compared with each draft on its own."""
    kv = paged_kv_cache([12])
    q = torch.randn(1, 5, HEADS, SIZE)  # tokens 7 to 11: the root, its two children, a child of each
    tree = torch.tensor([[0b00001, 0b00011, 0b00101, 0b01011, 0b10101]])
    out = torch.empty_like(q)
    result = paged_verify_attention(q, kv, 0.3, tree=tree, out=out)
    assert result is out
    order = torch.arange(5)
    for path in ([0, 1, 3], [0, 2, 4]):
        keys, values, table = kv.cache.keys.clone(), kv.cache.values.clone(), kv.block_table
        for place, node in zip((7, 8, 9), path, strict=True):
            to, taken = (table[0, place // 4], place % 4), (table[0, (7 + node) // 4], (7 + node) % 4)
            keys[to[0], :, to[1]] = kv.cache.keys[taken[0], :, taken[1]]
            values[to[0], :, to[1]] = kv.cache.values[taken[0], :, taken[1]]
        path_kv = PagedKVCache(KVCache(keys, values), table, torch.tensor([10]))
        alone = paged_verify_attention(q[:, order[path]], path_kv, 0.3)
        torch.testing.assert_close(result[:, path], alone)
