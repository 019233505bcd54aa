from quire_server.core.prefix_chain import PrefixChain


def test_the_digests_cover_the_whole_prefix_and_the_salt() -> None:
    chains = [PrefixChain(""), PrefixChain(""), PrefixChain("salt")]
    for chain, first in zip(chains, (1, 0, 1), strict=True):
        chain.extend([first, 2, 3, 4, 5, 6, 7, 8], 2, 4)
    assert len({chain.digests[1] for chain in chains}) == 3
