"""Prefill and decode on servers of different numbers of ranks: the answers of one server of one rank."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.ports import free_ports
from tests.server import tiny_model
from tests.server.engine.faulty_link import FaultyLink
from tests.server.launch import Server
from tests.server.serving import roles
from tests.server.serving.roles import answer, assert_all_blocks_are_free, body, same, transfers

# (ranks that share each layer, stages). The model has 4 heads, 2 of keys and values: four ranks have each of
# these twice.
SIZES = [(1, 1), (2, 1), (4, 1), (1, 2)]
# Prompts of several chunks beside decodes.
CHUNKED = ("--max-num-batched-tokens", "48", "--max-num-seqs", "6")
BODIES = [body(number, max_tokens=256) for number in range(6)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def wanted(tiny, tmp_path_factory):
    """The answers of one server."""
    with Server(tiny, tmp_path_factory.mktemp("local"), *roles.EXACT).wait_ready() as server:
        return [answer(server, each) for each in BODIES]


@pytest.fixture(scope="module")
def producers(tiny, tmp_path_factory):
    """One of each size, with its address."""
    ports = free_ports(len(SIZES))
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(
                roles.producer(tiny, tmp_path_factory.mktemp("prefill"), port, *ranks(*size))
            )
            for size, port in zip(SIZES, ports, strict=True)
        ]
        yield {
            size: (server.wait_ready(), ("127.0.0.1", port))
            for size, server, port in zip(SIZES, servers, ports, strict=True)
        }


def ranks(tensor, pipeline):
    return (*CHUNKED, "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline))


def answers(server, salt):
    """To all requests at once, and again, when their prefixes are cached."""
    bodies = [{**each, "cache_salt": salt} for each in BODIES]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [list(pool.map(lambda each: answer(server, each), bodies)) for _ in range(2)]


@pytest.mark.deep
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("decode", "transport"),
    [((2, 1), "tcp"), ((1, 1), "shared_memory"), ((4, 1), "shared_memory"), ((1, 2), "tcp")],
)
def test_answers_are_those_of_one_server_whatever_both_sizes(
    tiny, wanted, producers, tmp_path, decode, transport
):
    link = FaultyLink(("127.0.0.1", 0), lambda: None)  # to each producer in turns
    flags = (*ranks(*decode), "--kv-transport", transport)
    with roles.consumer(tiny, tmp_path, link.address[1], *flags).wait_ready() as consumer:
        assert len(consumer.ranks()) == decode[0] * decode[1]
        for number, (size, (producer, address)) in enumerate(producers.items(), start=1):
            assert len(producer.ranks()) == size[0] * size[1]
            link.target = address
            for found in answers(consumer, f"{decode} {transport} {size}"):
                assert list(map(same, found, wanted)) == [True] * len(BODIES), size
            assert transfers(consumer) == (number * len(BODIES), 0), size
            assert_all_blocks_are_free(producer, consumer)
    link.close()


@pytest.mark.deep
def test_smollm2_on_three_ranks_computes_prompts_for_one_rank(smollm2, tmp_path):
    """It has three heads of keys and values."""
    (port,) = free_ports(1)
    bodies = [body(number, prompt=f"The {number} rivers of the country. " * 20) for number in range(3)]
    for name in ("prefill", "decode"):
        (tmp_path / name).mkdir()
    flags = ("--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(96 << 20))
    with (
        roles.producer(
            smollm2, tmp_path / "prefill", port, *flags, "--tensor-parallel-size", "3"
        ) as producer,
        roles.consumer(smollm2, tmp_path / "decode", port, *flags) as consumer,
    ):
        producer.wait_ready()
        consumer.wait_ready()
        here = [answer(consumer, {**each, "prompt_logprobs": 0, "cache_salt": "here"}) for each in bodies]
        assert transfers(consumer) == (0, 0)
        assert [answer(consumer, each) for each in bodies] == here
        assert transfers(consumer) == (len(bodies), 0)
        assert_all_blocks_are_free(producer, consumer)


@pytest.mark.deep
def test_a_producer_of_several_ranks_one_of_which_is_killed_costs_no_answer(tiny, tmp_path):
    roles_of = {"prefill": ranks(2, 1), "decode": ranks(2, 1)}
    bodies = [body(number) for number in range(30, 60)]
    with roles.servers(tiny, tmp_path, **roles_of) as (producer, consumer):
        here = [answer(consumer, {**each, "prompt_logprobs": 0, "cache_salt": "here"}) for each in bodies]
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda each: answer(consumer, each), bodies)
            consumer.wait("a transfer", lambda: transfers(consumer)[0] > 2)
            os.kill(producer.ranks()[1], signal.SIGKILL)
            assert list(found) == here
        producer.wait("gone", producer.ended)
        assert answer(consumer, body(60))[0] == answer(consumer, body(60, cache_salt="again"))[0]
        succeeded, failed = transfers(consumer)
        assert succeeded + failed == len(bodies) + 2
        assert failed >= 2
        assert_all_blocks_are_free(consumer)
