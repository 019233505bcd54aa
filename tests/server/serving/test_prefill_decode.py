"""Prefill and decode on different servers: the answers of one server, whatever happens to the other one."""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from quire_server.config import parse_args
from quire_server.errors import ConfigError
from quire_server.kv_transfer import frames
from quire_server.kv_transfer.frames import Kind
from tests.server import tiny_model
from tests.server.launch import NO_TLS, Server
from tests.server.serving.roles import (
    EXACT,
    answer,
    assert_all_blocks_are_free,
    body,
    same,
    servers,
    transfers,
)

CLIENTS = ("none", "other")  # each is its own API key; the first is what a test sends that names no key


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def local(tiny, tmp_path_factory):
    with Server(tiny, tmp_path_factory.mktemp("local"), *EXACT).wait_ready() as server:
        yield server


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """A producer and a consumer that stay healthy, with two API keys."""
    keys = tmp_path_factory.mktemp("keys")
    for client in CLIENTS:
        (keys / client).write_text(client)
    flags = ("--api-keys-dir", str(keys))
    with servers(tiny, tmp_path_factory.mktemp("pair"), *flags, decode=("--kv-transport", "tcp")) as both:
        yield both


def test_answers_are_those_of_one_server(pair, local):
    producer, consumer = pair
    bodies = [
        body(0),
        body(1, logprobs=2),
        body(2, temperature=1.0, seed=7),
        body(3, cache_salt="a"),
        body(3, cache_salt="b"),
        body(4, structured_outputs={"regex": "[a-z ]{10,20}"}, ignore_eos=False),
        *(body(number) for number in range(5, 12)),
    ]
    wanted, before = [answer(local, each) for each in bodies], transfers(consumer)
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda each: answer(consumer, each), bodies))
    assert all(map(same, found, wanted))
    after = before[0] + len(bodies), before[1]
    assert transfers(consumer) == after
    again = [answer(consumer, each) for each in bodies]
    assert all(map(same, again, wanted))
    assert answer(consumer, body(0, prompt="short"))[0] == answer(local, body(0, prompt="short"))[0]
    assert transfers(consumer) == after, "a prefix that is cached, or short, is not fetched"
    assert_all_blocks_are_free(producer, consumer)


def test_a_prefix_that_was_fetched_for_one_key_is_no_other_key_s(pair, local):
    producer, consumer = pair
    before = transfers(consumer)
    for number, key in enumerate((*CLIENTS, *CLIENTS)):
        found = consumer.post("/v1/completions", body(17), key=key).json()
        assert found["choices"][0]["text"] == answer(local, body(17))[0]
        has_it_already = number >= len(CLIENTS)
        assert (found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == has_it_already
    assert transfers(consumer) == (before[0] + len(CLIENTS), before[1])
    assert_all_blocks_are_free(producer, consumer)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "noise",
    [
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps(os.getcwd),
        frames.header(Kind.READ, 72) + bytes(72),
    ],
    ids=["random", "http", "pickle", "a reference without the key"],
)
def test_who_sends_noise_to_the_transfer_port_is_refused_and_transfers_go_on(pair, local, noise):
    producer, consumer = pair
    line = next(one for one in producer.log.read_text().splitlines() if "listening for consumers" in one)
    before = transfers(consumer)
    with socket.create_connection(("127.0.0.1", json.loads(line)["port"]), 5) as stranger:
        stranger.sendall(noise)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):  # closed with bytes of the noise unread
            while stranger.recv(4096):
                pass
    wanted = body(300 + len(noise))
    assert answer(consumer, wanted) == answer(local, wanted)
    assert transfers(consumer) == (before[0] + 1, before[1])
    assert producer.probe("livez") == producer.probe("readyz") == 200


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_flipped_bit_is_found_and_the_prompt_computed_here(tiny, local, tmp_path, transport):
    flags = ("--kv-transport", transport)
    with servers(tiny, tmp_path, decode=flags, fault="corrupt_kv_transfer:after=3") as (producer, consumer):
        assert answer(consumer, body(8)) == answer(local, body(8))
        producer.wait_fault("corrupt_kv_transfer")
        assert transfers(consumer) == (0, 1)
        assert "another checksum" in consumer.log.read_text()
        assert answer(consumer, body(8)) == answer(local, body(8))
        assert_all_blocks_are_free(producer, consumer)


@pytest.mark.deep
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("signum", "transport"),
    [
        (signal.SIGKILL, "tcp"),
        (signal.SIGKILL, "shared_memory"),
        (signal.SIGKILL, "nixl"),
        (signal.SIGSTOP, "tcp"),
        (signal.SIGSTOP, "nixl"),
    ],
)
def test_a_producer_that_dies_or_freezes_costs_time_and_no_answer(tiny, local, tmp_path, signum, transport):
    bodies = [body(number) for number in range(30, 70)]
    wanted = [answer(local, each) for each in bodies]
    with servers(tiny, tmp_path, "--kv-transport", transport) as (producer, consumer):
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda each: answer(consumer, each), bodies)
            consumer.wait("a transfer", lambda: transfers(consumer)[0] > 2)
            engine = producer.children()["engine"]
            os.kill(engine, signum)
            assert list(found) == wanted
        assert answer(consumer, body(90)) == answer(local, body(90))
        assert consumer.statusz()["transferDegraded"] is True
        succeeded, failed = transfers(consumer)
        assert succeeded + failed == len(bodies) + 1
        assert failed >= 1
        assert consumer.probe("readyz") == consumer.probe("livez") == 200, (
            "a lost peer is no failure of its own"
        )
        assert_all_blocks_are_free(consumer)
        if signum == signal.SIGSTOP:
            os.kill(engine, signal.SIGCONT)
            assert_all_blocks_are_free(producer)


def test_clients_that_go_leave_nothing_on_either_side(pair, local):
    producer, consumer = pair

    def leave(number):
        with contextlib.suppress(httpx.TimeoutException):
            seconds = 0.002 * (number % 20) + 0.002
            url = consumer.url + "/v1/completions"
            httpx.post(url, json=body(number, max_tokens=200), timeout=seconds, verify=NO_TLS)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(100, 180)))
    assert answer(consumer, body(99)) == answer(local, body(99))
    consumer.wait("idle", lambda: consumer.metric("llm_running_requests") == 0)
    assert_all_blocks_are_free(producer, consumer)


@pytest.mark.deep
def test_servers_with_other_settings_exchange_nothing(tiny, local, tmp_path):
    with servers(tiny, tmp_path, prefill=("--block-size", "32")) as (producer, consumer):
        assert answer(consumer, body(5)) == answer(local, body(5))
        assert transfers(consumer) == (0, 1)
        assert "other KV blocks" in consumer.log.read_text() + producer.log.read_text()
        assert_all_blocks_are_free(producer, consumer)


@pytest.mark.deep
def test_held_blocks_that_nobody_reads_are_freed_when_their_lease_ends(tiny, tmp_path):
    """A consumer that freezes after it got its reference."""
    flags = ("--kv-lease-seconds", "2")
    with servers(tiny, tmp_path, prefill=flags) as (producer, consumer), ThreadPoolExecutor(4) as pool:
        bodies = [body(number, max_tokens=4) for number in range(200, 260)]
        found = [pool.submit(answer, consumer, each) for each in bodies]
        with frozen_while_blocks_are_held(producer, consumer):
            frozen_at = time.monotonic()
            producer.wait("no hold", lambda: not producer.metric("llm_kv_transfer_held"))
            assert_all_blocks_are_free(producer, seconds=20)
            assert time.monotonic() - frozen_at < 2 + 5
        assert all(each.result()[0] for each in found)


@pytest.mark.deep
def test_a_producer_that_drains_waits_for_those_who_read_its_blocks(tiny, tmp_path):
    """Else the end of each prefill pod in a rollout would have prompts computed twice."""
    with servers(tiny, tmp_path) as (producer, consumer), ThreadPoolExecutor(4) as pool:
        found = [pool.submit(answer, consumer, body(number, max_tokens=4)) for number in range(400, 460)]
        with frozen_while_blocks_are_held(producer, consumer):
            producer.terminate()
            producer.wait("it drains", lambda: producer.statusz()["phase"] == "draining")
            with pytest.raises(subprocess.TimeoutExpired):
                producer.process.wait(2)
        assert all(each.result()[0] for each in found)
        assert producer.wait_end() == 0


@contextlib.contextmanager
def frozen_while_blocks_are_held(producer, consumer):
    """The consumer's engine, stopped at a moment at which blocks are held for it."""
    engine = consumer.children()["engine"]

    def is_frozen_in_time():
        os.kill(engine, signal.SIGSTOP)
        if producer.metric("llm_kv_transfer_held"):
            return True
        os.kill(engine, signal.SIGCONT)
        return False

    try:
        consumer.wait("a moment at which blocks are held", is_frozen_in_time)
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


def test_a_transfer_port_that_is_taken_is_named_with_the_remedy(tiny, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ("--kv-role", "kv_producer", "--kv-transfer-port", str(taken.getsockname()[1]))
        with Server(tiny, tmp_path, *EXACT, *flags) as server:
            server.wait_end()
            assert "cannot be listened on" in server.failure()["message"]


def test_without_its_package_nixl_is_refused_at_the_start_by_the_name_of_the_extra(monkeypatch):
    flags = ["model", "--kv-role", "kv_producer", "--kv-transport", "nixl"]
    assert parse_args(flags, {}).kv_transport == "nixl"
    monkeypatch.setattr("quire_server.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("needs the extra quire-llm[nixl]")):
        parse_args(flags, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-role", "kv_consumer"), "--kv-role kv_consumer and --kv-producers need each other"),
        (("--kv-producers", "a:1"), "--kv-role kv_consumer and --kv-producers need each other"),
        (("--kv-role", "kv_consumer", "--kv-producers", "host"), "must be like HOST:PORT"),
        (("--kv-role", "kv_producer", "--no-enable-prefix-caching"), "needs the prefix cache"),
        (("--kv-role", "kv_producer", "--kv-transfer-port", "8001"), "is taken by another port"),
        (("--kv-role", "kv_producer", "--kv-staging-bytes", "0"), "--kv-staging-bytes"),
        (("--kv-role", "kv_producer", "--tensor-parallel-size", "2", "--nodes", "2", "--leader-address", "a",
          "--pod-address", "b"), "--nodes does not work with --kv-role"),
        (("--kv-role", "kv_producer", "--kv-offload-host-bytes", "1000000"), "does not work with --kv-role"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_a_sentence(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_args(["model", *flags], {})
