"""Ranks join by what rank 0 tells them over their connection, and then add their parts."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire_server.core.topology import Topology
from quire_server.engine.rank_channel import Channel, ChannelClosedError, Welcome
from quire_server.errors import ConfigError
from quire_server.layers import communicators
from quire_server.layers.parallel import CollectiveError, Gloo
from quire_server.layers.shared_memory import SharedMemory

RANKS = 3
KINDS = {communicators.GLOO: Gloo}
if SharedMemory.is_supported():
    KINDS[communicators.SHARED_MEMORY] = SharedMemory


@pytest.fixture
def channels():
    """Rank 0's, and the others' of ranks 1 and 2."""
    pairs = [socket.socketpair() for _ in range(1, RANKS)]
    yield [Channel(near) for near, _ in pairs], [Channel(far) for _, far in pairs]
    for near, far in pairs:
        near.close()
        far.close()


def exchange(communicator, rank):
    """The sum of 1, 2 and 3, and on rank 0 all three."""
    part = torch.full((2, 4), float(rank + 1))
    return communicator.all_reduce(part.clone()), communicator.gather_to_leader(part)


def lead(kind, near, directory):
    topology = Topology(RANKS)
    with communicators.shared(kind, topology) as descriptor:
        for channel in near:
            channel.say(Welcome(kind), descriptor=descriptor)
        communicator = communicators.join(kind, topology, directory, descriptor)
    assert type(communicator) is KINDS[kind]
    return exchange(communicator, 0)


def follow(rank, channel, directory):
    welcome, descriptor = channel.hear_with_descriptor(60)
    communicator = communicators.join(welcome.communicator, Topology(RANKS, rank), directory, descriptor)
    if descriptor is not None:
        os.close(descriptor)
    return exchange(communicator, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_join_by_what_they_are_told_and_add_their_parts(kind, channels, tmp_path):
    near, far = channels
    with ThreadPoolExecutor(RANKS) as pool:
        leader = pool.submit(lead, kind, near, tmp_path)
        others = [pool.submit(follow, rank, far[rank - 1], tmp_path) for rank in range(1, RANKS)]
        results = [one.result(60) for one in (leader, *others)]
    assert all(torch.equal(total, torch.full((2, 4), 6.0)) for total, _ in results)
    assert torch.equal(results[0][1], torch.tensor([[1.0] * 4 + [2.0] * 4 + [3.0] * 4] * 2))


def test_the_fastest_kind_is_chosen():
    assert communicators.choose() == list(KINDS)[-1]


def test_a_kind_that_needs_a_descriptor_is_not_joined_without_one(tmp_path):
    with pytest.raises(ConfigError, match="There is no communicator 'shared-memory'"):
        communicators.join(communicators.SHARED_MEMORY, Topology(2), tmp_path, None)


def test_a_rank_that_waits_to_be_told_learns_that_rank_0_has_ended(channels):
    near, far = channels
    near[0].close()
    with pytest.raises(ChannelClosedError):
        far[0].hear_with_descriptor(60)


def test_a_rank_that_takes_no_part_in_an_exchange_over_gloo_fails_the_others(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: Gloo(Topology(2, rank), tmp_path, deadline=2.0), range(2)))
    with pytest.raises(CollectiveError, match="did not take part in an exchange"):
        ranks[0].all_reduce(torch.ones(2))
