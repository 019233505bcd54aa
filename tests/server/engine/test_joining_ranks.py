"""Ranks join by what rank 0 tells them over their connection, and then add their parts."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from quire_server.config import ServeConfig
from quire_server.core.rank_step import Echo, RankLimits, RankStep, Work
from quire_server.core.step import Step
from quire_server.core.topology import Topology
from quire_server.engine import rank_channel, rank_group
from quire_server.engine.codec import CodecError
from quire_server.engine.rank_channel import (
    Channel,
    ChannelClosedError,
    Hello,
    Loaded,
    Prepared,
    Refused,
    Welcome,
)
from quire_server.engine.rank_faults import RankFaults
from quire_server.engine.rank_group import RankGroup
from quire_server.engine.step_codec import StepDecoder, encode_echo
from quire_server.errors import ConfigError, MixedRevisionError, RankLostError
from quire_server.fault_injection import parse
from quire_server.layers import communicators, parallel
from quire_server.layers.ops import record
from quire_server.layers.parallel import CollectiveError, Gloo, Meeting, SingleRank, Stages
from quire_server.layers.shared_memory import SharedMemory
from tests.server import tiny_model

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
    with communicators.shared(kind, topology) as (descriptor,):
        for channel in near:
            channel.say(Welcome(kind, ""), descriptor=descriptor)
        communicator = communicators.join(kind, topology, Meeting(directory), descriptor)
    assert type(communicator) is KINDS[kind]
    return exchange(communicator, 0)


def follow(rank, channel, directory):
    welcome, descriptor = channel.hear_with_descriptor(60)
    communicator = communicators.join(
        welcome.communicator, Topology(RANKS, rank), Meeting(directory), descriptor
    )
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


def staged(kind, directory, descriptors, rank, done):
    """What a rank of two stages of two ranks receives and adds."""
    topology = Topology(2, rank, 2)
    communicator = communicators.join(kind, topology, Meeting(directory), descriptors[topology.stage])
    part = torch.full((2, 4), float(rank))
    found = [communicator.all_reduce(part.clone())]
    if topology.is_first_stage:
        for number in range(3):  # more than are received yet
            communicator.send(part + 10 * number, topology.next)
    else:
        found += [communicator.recv((2, 4), torch.float32, topology.previous) for _ in range(3)]
        found.append(communicator.gather_to_leader(part))
    if rank == topology.head_rank:
        communicator.send(found[-1], 0)
    if topology.is_leader:
        found.append(communicator.recv((2, 8), torch.float32, topology.head_rank))
    done.wait(60)  # what was sent arrives while its sender lives
    return found, communicator.calls, communicator.bytes, communicator.waited


@pytest.mark.parametrize("kind", KINDS)
def test_stages_hand_on_what_they_computed_in_order(kind, tmp_path):
    with communicators.shared(kind, Topology(2, 0, 2)) as descriptors, ThreadPoolExecutor(4) as pool:
        done = threading.Barrier(4)
        ranks = [pool.submit(staged, kind, tmp_path, descriptors, rank, done) for rank in range(4)]
        results = [one.result(60) for one in ranks]
    sums = [found[0][0, 0].item() for found, *_ in results]
    assert sums == [1.0, 1.0, 5.0, 5.0], "of each stage's own ranks"
    received = [[tensor[0, 0].item() for tensor in found[1:4]] for found, *_ in results[2:]]
    assert received == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]
    assert torch.equal(results[0][0][-1], torch.tensor([[2.0] * 4 + [3.0] * 4] * 2))
    each = 2 * 4 * 4  # bytes
    assert [calls for _, calls, *_ in results] == [5, 4, 6, 5]
    assert all(results[rank][-1] > 0 for rank in (0, 2, 3)), "the time in which they waited for other stages"
    assert [size for _, _, size, _ in results] == [6 * each, 4 * each, 7 * each, 5 * each]


def joined(kind, directory, descriptor, rank):
    """A communicator whose calls wait longer than a test lasts."""
    if kind == communicators.GLOO:
        return Gloo(Topology(RANKS, rank), Meeting(directory), deadline=120)
    return SharedMemory(descriptor, rank, deadline=120)


def leave(communicator):
    communicator.abort()
    with pytest.raises(CollectiveError):
        communicator.all_reduce(torch.ones(2, 4))


def miss(communicator):
    with pytest.raises(CollectiveError):
        communicator.all_reduce(torch.ones(2, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_ends_the_calls_of_all_long_before_their_deadline(kind, tmp_path):
    began_at = time.monotonic()
    with communicators.shared(kind, Topology(RANKS)) as (descriptor,), ThreadPoolExecutor(RANKS) as pool:
        joining = [pool.submit(joined, kind, tmp_path, descriptor, rank) for rank in range(RANKS)]
        ranks = [one.result(60) for one in joining]
        acts = (miss, leave, miss)
        for one in [pool.submit(act, rank) for act, rank in zip(acts, ranks, strict=True)]:
            one.result(60)
    assert time.monotonic() - began_at < 60


def test_a_rank_that_leaves_ends_what_other_stages_wait_for(tmp_path):
    def stage(rank):
        return Stages(SingleRank(), Topology(1, rank, 2), Meeting(tmp_path), deadline=120)

    with ThreadPoolExecutor(2) as pool:
        first, second = (one.result(60) for one in [pool.submit(stage, rank) for rank in range(2)])
        waiting = pool.submit(first.recv, (2, 4), torch.float32, 1)
        second.abort()
        with pytest.raises(CollectiveError, match="did not take part"):
            waiting.result(60)
        with pytest.raises(CollectiveError, match="has left the others"):
            second.recv((2, 4), torch.float32, 0)


def test_a_single_rank_has_none_to_leave():
    rank = SingleRank()
    rank.abort()
    assert torch.equal(rank.all_reduce(torch.ones(2)), torch.ones(2))


def test_a_stage_learns_that_another_one_has_ended(tmp_path):
    have_joined = threading.Barrier(2)  # a rank that ended before would fail the other one's join

    def join(rank):
        communicator = communicators.join(communicators.GLOO, Topology(1, rank, 2), Meeting(tmp_path), None)
        have_joined.wait(60)
        return communicator

    def end(rank):
        join(rank).abort()

    def wait(rank):
        communicator = join(rank)
        with pytest.raises(CollectiveError, match="did not take part"):
            communicator.recv((2, 4), torch.float32, 1)
        with pytest.raises(CollectiveError, match="did not take part"):
            communicator.send(torch.zeros(4), 1)

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(wait, 0), pool.submit(end, 1)]:
            one.result(60)


def test_the_fastest_kind_is_chosen():
    assert communicators.choose() == list(KINDS)[-1]


def test_a_kind_that_needs_a_descriptor_is_not_joined_without_one(tmp_path):
    with pytest.raises(ConfigError, match="There is no communicator 'shared-memory'"):
        communicators.join(communicators.SHARED_MEMORY, Topology(2), Meeting(tmp_path), None)


def test_a_rank_that_waits_to_be_told_learns_that_rank_0_has_ended(channels):
    near, far = channels
    near[0].close()
    with pytest.raises(ChannelClosedError):
        far[0].hear_with_descriptor(60)


def test_a_rank_that_takes_no_part_in_an_exchange_over_gloo_fails_the_others(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        ranks = list(
            pool.map(lambda rank: Gloo(Topology(2, rank), Meeting(tmp_path), deadline=2.0), range(2))
        )
    with pytest.raises(CollectiveError, match="did not take part in an exchange"):
        ranks[0].all_reduce(torch.ones(2))


@pytest.mark.parametrize("exchange", [Gloo.all_reduce, Gloo.gather_to_leader])
def test_an_exchange_over_gloo_ends_a_recording_before_it_waits_for_another_rank(exchange, tmp_path):
    """Else one rank makes an exchange while it records, and another one does not."""
    with ThreadPoolExecutor(2) as pool:
        ranks = list(
            pool.map(lambda rank: Gloo(Topology(2, rank), Meeting(tmp_path), deadline=2.0), range(2))
        )
    part = torch.ones(2, 2)
    assert [record(lambda rank=rank: exchange(rank, part)) for rank in ranks] == [None, None]
    assert [rank.calls for rank in ranks] == [0, 0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return ServeConfig(
        model=tiny_model.write(tmp_path_factory.mktemp("models") / "tiny"), tensor_parallel_size=2
    )


EMPTY = RankStep(Step(1, (), (), (), (), (), ()))


def take_part(settings, directory):
    """As rank 1: join, and echo one step."""
    own = rank_group.identity(settings, {})
    joined = rank_group.join(directory, settings, 1, own)
    decoder = StepDecoder(RankLimits(1, 1, 0, 0, 1, 1), joined.incarnation)
    decoder.decode(joined.channel.receive(1 << 16, 60))
    joined.channel.send(encode_echo(Echo(decoder.sequence, decoder.digest, work=Work(5, 9))))
    return joined


def test_a_rank_that_rank_0_has_taken_in_follows_its_steps(settings, tmp_path):
    steps, echoes = [], []

    def echoed(*echo):
        echoes.append(echo)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(take_part, settings, tmp_path)
        group, _ = RankGroup.gather(tmp_path, settings, bool, steps.append, echoed, RankFaults(parse({}), 0))
        group.send(EMPTY)
        group.collect(work=Work(7, 0))
        joined = other.result(60)
    assert steps == [1]
    assert echoes == [(0, 1, Work(7, 0)), (1, 1, Work(5, 9))], "of every rank, what it did"
    assert len(joined.incarnation) == 16
    joined.channel.close()
    for channel in group._channels.values():
        channel.close()


def test_a_rank_that_ends_while_the_ranks_join_is_named(settings, tmp_path):
    def come_and_go():
        with contextlib.closing(Channel.connect(tmp_path, 60)) as channel:
            channel.say(Hello(1, "", rank_group.identity(settings, {})))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(come_and_go)
        original = rank_channel.stop_listening

        def stop_when_it_has_gone(listener, run_dir):
            other.result(60)
            original(listener, run_dir)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(RankLostError, match="Rank 1 ended"):
            patch.setattr(rank_channel, "stop_listening", stop_when_it_has_gone)
            RankGroup.gather(tmp_path, settings, bool, bool, bool, RankFaults(parse({}), 0))


def test_a_rank_that_ends_before_it_is_told_the_number_of_blocks_is_named():
    near, far = socket.socketpair()
    with near, far:
        Channel(far).say(Loaded(5, "pod-1"))
        far.shutdown(socket.SHUT_RD)
        with pytest.raises(RankLostError, match="Rank 1 ended while the ranks joined"):
            RankGroup({1: Channel(near)}).agree_on_blocks(5, bool, 5.0)


def test_steps_of_another_group_are_found():
    near, far = socket.socketpair()
    with near, far:
        group = RankGroup({1: Channel(near)}, incarnation="this")
        group.send(EMPTY)
        decoder = StepDecoder(RankLimits(1, 1, 0, 0, 1, 1), "that")
        decoder.decode(Channel(far).receive(1 << 16, 60))
        Channel(far).send(encode_echo(Echo(decoder.sequence, decoder.digest)))
        with pytest.raises(RankLostError, match="Rank 1 executed another step"):
            group.collect()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            Refused("MixedRevision", "rank 1 has another image than rank 0"),
            MixedRevisionError,
            "another image",
        ),
        (Refused("OldIncarnation", "rank 1 belongs to group x"), RankLostError, "OldIncarnation"),
        (Prepared(True), CodecError, "expected a welcome"),
        # Its node has no GPU, and --device is auto.
        (Welcome(communicators.NCCL, "x"), ConfigError, "computes on a GPU, and rank 1 on .* on a CPU"),
    ],
)
def test_a_rank_that_is_not_taken_in_says_why(settings, tmp_path, answer, error, message):
    def refuse(listener):
        channel = Channel(listener.accept()[0])
        channel.hear(60)
        channel.say(answer)
        return channel

    with rank_channel.listen(tmp_path, 1) as listener, ThreadPoolExecutor(1) as pool:
        leader = pool.submit(refuse, listener)
        with pytest.raises(error, match=message):
            rank_group.join(tmp_path, settings, 1, rank_group.identity(settings, {}))
        leader.result(60).close()


def test_ranks_of_another_model_revision_or_setting_have_another_identity(settings, tmp_path):
    own = rank_group.identity(settings, {"QUIRE_REVISION": "r1"})
    assert own.revision == "r1"
    other = tiny_model.write(tmp_path / "other", seed=5)
    changed = replace(settings, model=other)
    assert rank_group.identity(changed, {}).differences(own) == ("revision", "model", "arguments")
    assert rank_group.identity(settings, {"QUIRE_REVISION": "r1"}) == own


def test_an_address_at_which_no_other_node_can_connect_is_named_with_the_remedy(tmp_path, monkeypatch):
    """192.0.2.1 is of no machine."""
    settings = ServeConfig(tmp_path, tensor_parallel_size=2, nodes=2, pod_address="192.0.2.1")
    with (
        pytest.raises(ConfigError, match=r"--pod-address 192\.0\.2\.1, port 7600, .* Give an address of"),
        rank_group._listening(settings, tmp_path, 2),
    ):
        raise AssertionError("it listens")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(parallel, "STORE_PORT", taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"at 127\.0\.0\.1, port \d+, .* Free the port"):
            Meeting(tmp_path, "127.0.0.1").store("all", 2)
