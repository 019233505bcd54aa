"""/metrics of a divided model: each rank, also those of other nodes, from what rank 0 has heard of them."""

import time
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire_server.api.ranks import read_ranks
from quire_server.config import ServeConfig
from quire_server.core.rank_step import Work
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.health.heartbeat import Process, SharedState
from quire_server.metrics.requests import Metrics

HOSTS = {0: "m-0", 1: "m-0-1"}


def group(directory, **fields):
    """Two nodes with a rank each, as the leader sees them, and what /metrics says of them."""
    state, metrics = SharedState.create(directory), Metrics("m")
    settings = ServeConfig(model=Path("m"), tensor_parallel_size=2, nodes=2, **fields)
    metrics.ranks.read = partial(read_ranks, settings, state, lambda: HOSTS)
    return state, HeartbeatWriter(state, time.monotonic()), metrics


def values(metrics):
    """By name and rank."""
    text = metrics.exposition("")[0].decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    labels = {frozenset(one.labels) for one in samples if "rank" in one.labels}
    assert labels <= {frozenset(("model", "rank", "host"))}
    assert all(
        one.labels["host"] == HOSTS[int(one.labels["rank"])] for one in samples if "rank" in one.labels
    )
    return {
        (one.name.removeprefix("llm_rank_"), int(one.labels["rank"])): one.value
        for one in samples
        if "rank" in one.labels
    }


def test_what_each_rank_did_is_counted_on_whichever_node(tmp_path):
    state, writer, metrics = group(tmp_path)
    state.beat(Process.ENGINE)
    assert values(metrics)["steps_total", 1] == 0, "series exist from the start"
    for number in (1, 2):
        writer.rank_stepped(number)
        writer.rank_echoed(0, number, Work(1000, 64))
        writer.rank_echoed(1, number, Work(250_000, 64))
    found = values(metrics)
    assert (found["steps_total", 0], found["steps_total", 1]) == (2, 2)
    assert (found["busy_seconds_total", 0], found["busy_seconds_total", 1]) == (0.002, 0.5)
    assert (found["exchanged_bytes_total", 0], found["exchanged_bytes_total", 1]) == (128, 128)
    assert found["silence_seconds", 1] == 0, "it has acknowledged all steps"


def test_a_rank_that_has_not_acknowledged_a_step_is_silent_since_it_was_sent(tmp_path):
    state, writer, metrics = group(tmp_path)
    writer.rank_stepped(1)
    sent_at = time.monotonic()
    writer.rank_echoed(0, 1, Work(1000, 64))
    time.sleep(0.05)  # the rank does not answer for so long
    state.beat(Process.ENGINE)
    found = values(metrics)
    assert 0.05 <= found["silence_seconds", 1] <= time.monotonic() - sent_at + 0.01
    assert found["silence_seconds", 0] < found["silence_seconds", 1]


def test_a_server_with_one_rank_has_no_series_of_ranks(tmp_path):
    state, metrics = SharedState.create(tmp_path), Metrics("m")
    metrics.ranks.read = partial(read_ranks, ServeConfig(model=Path("m")), state, dict)
    assert values(metrics) == {}
