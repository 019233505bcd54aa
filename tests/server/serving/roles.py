"""A producer and a consumer of KV blocks, and what is asked of them."""

import contextlib

import pytest

from e2e.ports import free_ports
from tests.server.launch import Server

EXACT = ("--dtype", "float32", "--quantization", "none", "--max-num-batched-tokens", "128")
LONG = 64  # tokens from which a prefix is fetched


def producer(model, directory, port, *flags, fault=""):
    role = ("--kv-role", "kv_producer", "--kv-transfer-port", str(port))
    return Server(model, directory, *EXACT, *role, *flags, fault=fault)


def consumer(model, directory, port, *flags):
    """Of the producer behind this port."""
    role = ("--kv-role", "kv_consumer", "--kv-producers", f"127.0.0.1:{port}")
    return Server(model, directory, *EXACT, *role, "--local-prefill-below-tokens", str(LONG), *flags)


@contextlib.contextmanager
def servers(model, directory, *flags, prefill=(), decode=(), fault=""):
    """(producer, consumer), both ready."""
    (port,) = free_ports(1)
    for name in ("prefill", "decode"):
        (directory / name).mkdir(parents=True)
    with (
        producer(model, directory / "prefill", port, *flags, *prefill, fault=fault) as one,
        consumer(model, directory / "decode", port, *flags, *decode) as other,
    ):
        yield one.wait_ready(), other.wait_ready()


def body(number, **more):
    prompt = f"request {number} " * (8 + 3 * (number % 9))
    return {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **more}


def answer(server, wanted, key="none"):
    response = server.post("/v1/completions", wanted, key=key)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], (choice.get("logprobs") or {}).get("token_logprobs")


def same(found, wanted):
    return found[0] == wanted[0] and found[1] == (wanted[1] and pytest.approx(wanted[1], abs=1e-3))


def transfers(server):
    return server.metric("llm_kv_transfers_total"), server.metric("llm_kv_transfer_failures_total")


def assert_all_blocks_are_free(*each, seconds=10.0):
    for server in each:
        server.wait(
            "blocks are free", lambda one=server: one.metric("llm_kv_cache_utilization") == 0, seconds
        )
        assert server.metric("llm_kv_blocks_unaccounted") == 0
