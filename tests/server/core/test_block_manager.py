from array import array

import pytest

from quire_server.core import block_manager
from quire_server.core.block_manager import BlockManager, PrefixChain

SIZE = 4


def filled(blocks: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    """A table for these tokens, computed and published."""
    chain = PrefixChain(salt)
    hits = blocks.lookup(tokens, chain)
    table = blocks.take(hits, -(-len(tokens) // SIZE) - len(hits), chain)
    for index in range(len(hits), len(tokens) // SIZE):
        blocks.publish(tokens, chain, index, table[index])
    return table


def manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, SIZE, enable_prefix_caching=True)


def test_a_second_request_shares_the_full_blocks_of_its_prefix() -> None:
    blocks, prompt = manager(), list(range(10))
    first, second = filled(blocks, prompt), filled(blocks, [*prompt[:8], 77, 78])
    assert first[:2] == second[:2] and first[2] != second[2]
    blocks.check([first, second])
    assert blocks.num_free == 8 - 4


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks, prompt = manager(), list(range(8))
    filled(blocks, prompt)
    assert len(blocks.lookup(prompt, PrefixChain(""))) == 1


def test_another_salt_shares_nothing() -> None:
    blocks, prompt = manager(), list(range(9))
    filled(blocks, prompt, salt="alice")
    assert blocks.lookup(prompt, PrefixChain("bob")) == []
    assert len(blocks.lookup(prompt, PrefixChain("alice"))) == 2


def test_released_blocks_stay_findable_until_they_are_needed() -> None:
    blocks, prompt = manager(4), list(range(9))
    blocks.release(filled(blocks, prompt))
    assert blocks.num_free == 4
    assert len(blocks.lookup(prompt, PrefixChain(""))) == 2
    others = filled(blocks, [50, 51, 52, 53, 54, 55, 56, 57])  # two blank blocks are there for these
    assert blocks.evictions == 0 and len(blocks.lookup(prompt, PrefixChain(""))) == 2
    assert blocks.grow() is not None  # evicts the tail before the head
    assert blocks.evictions == 1 and len(blocks.lookup(prompt, PrefixChain(""))) == 1
    blocks.release(others)


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    blocks = manager(4)
    old, new = [1, 2, 3, 4, 9], [5, 6, 7, 8, 9]
    for tokens in (old, new, old):
        blocks.release(filled(blocks, tokens))
    for _ in range(3):
        blocks.grow()
    assert len(blocks.lookup(old, PrefixChain(""))) == 1 and not blocks.lookup(new, PrefixChain(""))


def test_a_hash_collision_never_hands_out_another_prompts_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "digest", lambda previous, block: b"always the same")
    blocks = manager(16)
    filled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.lookup([5, 6, 7, 8, 1, 2], PrefixChain("")) == []  # same tokens, other prefix
    assert blocks.lookup([9, 9, 9, 9, 9], PrefixChain("")) == []
    filled(blocks, [9, 9, 9, 9, 9])
    assert len(blocks.lookup([9, 9, 9, 9, 9], PrefixChain(""))) == 1
    assert blocks.lookup([9, 9, 9, 9, 9], PrefixChain("other")) == []


def test_the_chain_covers_the_whole_prefix() -> None:
    one, other = PrefixChain(""), PrefixChain("")
    one.extend([1, 2, 3, 4, 5, 6, 7, 8], 2, SIZE)
    other.extend([0, 2, 3, 4, 5, 6, 7, 8], 2, SIZE)
    assert one.digests[1] != other.digests[1]
    assert one.digests[0] == block_manager.digest(
        PrefixChain("").digests[0] if PrefixChain("").digests else block_manager.hashlib.sha256(b"").digest(),
        array("q", [1, 2, 3, 4]),
    )


def test_a_broken_account_is_noticed() -> None:
    blocks = manager()
    table = filled(blocks, [1, 2, 3])
    with pytest.raises(AssertionError):
        blocks.check([])
    blocks.release(table)
    with pytest.raises(AssertionError):
        blocks.release(table)


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(8, SIZE, enable_prefix_caching=False)
    filled(blocks, list(range(9)))
    assert blocks.lookup(list(range(9)), PrefixChain("")) == []
