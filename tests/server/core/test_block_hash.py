import pytest

from quire_server.core import block_hash
from quire_server.core.block_hash import BlockHashChain
from tests.server.core.test_kv_cache_manager import Cache


def test_the_digests_cover_the_whole_prefix_and_the_salt() -> None:
    chains = [BlockHashChain(""), BlockHashChain(""), BlockHashChain("salt")]
    for chain, first in zip(chains, (1, 0, 1), strict=True):
        chain.extend([first, 2, 3, 4, 5, 6, 7, 8], 2, 4)
    assert len({chain.digests[1] for chain in chains}) == 3


def test_prompts_with_colliding_hashes_never_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "digest", lambda previous, block: bytes([(previous[0] + 1) % 256]))
    cache = Cache()
    cache.computed([0, 0, 0, 0, 5])
    cache.computed([1, 1, 1, 1, 2, 2, 2, 2, 5])  # its first digest is taken
    assert cache.cached([0, 0, 0, 0, 2, 2, 2, 2, 5]) == 0  # and not the 8 of a chain of two prompts
