import pytest

from quire_server.core import prefix_chain
from quire_server.core.prefix_chain import PrefixChain
from tests.server.core.test_kv_manager import Cache


def test_the_digests_cover_the_whole_prefix_and_the_salt() -> None:
    chains = [PrefixChain(""), PrefixChain(""), PrefixChain("salt")]
    for chain, first in zip(chains, (1, 0, 1), strict=True):
        chain.extend([first, 2, 3, 4, 5, 6, 7, 8], 2, 4)
    assert len({chain.digests[1] for chain in chains}) == 3


def test_prompts_that_collide_never_build_on_each_others_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_chain, "digest", lambda previous, block: bytes([(previous[0] + 1) % 256]))
    cache = Cache()
    cache.computed([0, 0, 0, 0, 5])
    cache.computed([1, 1, 1, 1, 2, 2, 2, 2, 5])  # its first digest is taken
    assert cache.cached([0, 0, 0, 0, 2, 2, 2, 2, 5]) == 0  # and not the 8 of a chain of two prompts
