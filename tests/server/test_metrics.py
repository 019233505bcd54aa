"""/metrics under traffic: all that is promised there moves, under the names and buckets that others read."""

import contextlib
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire_server.gpu_metrics import GpuCollector, GpuSample
from tests.server.launch import Server

ASK = {"model": "tiny", "max_tokens": 250, "ignore_eos": True, "temperature": 0}
# Rows and blocks for two of the answers below, so that others queue and some have to give way.
SMALL = ("--num-gpu-blocks-override", "24", "--max-num-seqs", "4", "--max-num-queued-reqs", "8")

# What only a fault, a drain, a lower tier, a pin or a GPU moves; their own tests do.
STILL = {
    "llm_cancelled_requests",
    "llm_deadline_cut_answers",
    "llm_degraded_requests",
    "llm_drained_requests",
    "llm_gpu_memory_bytes",
    "llm_gpu_utilization_ratio",
    "llm_kv_blocks_unaccounted",
    "llm_prefix_cache_pinned_blocks",
    "llm_prefix_cache_pins_refused_blocks",
    "llm_swapped_requests",
}
STILL_PREFIXES = ("llm_kv_tier_", "llm_spec_decode_", "vllm:spec_decode_")

REQUEST_SECONDS = [
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
]
STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200]  # of a context of 24 blocks of 16
BUCKETS = {
    "llm_ttft_seconds": [0.1, 0.2, 0.5, 1, 2, 5, 10],
    "llm_request_latency_seconds": [0.5, 1, 2, 5, 10, 30, 60],
    "vllm:e2e_request_latency_seconds": REQUEST_SECONDS,
    "vllm:request_queue_time_seconds": REQUEST_SECONDS,
    "vllm:request_prefill_time_seconds": REQUEST_SECONDS,
    "vllm:request_decode_time_seconds": REQUEST_SECONDS,
    "vllm:request_inference_time_seconds": REQUEST_SECONDS,
    "vllm:iteration_tokens_total": STEP_TOKENS,
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:request_max_num_generation_tokens": LENGTHS,
    "vllm:request_params_max_tokens": LENGTHS,
    "vllm:request_params_n": [1, 2, 5, 10, 20],
}


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    with Server(tiny, tmp_path_factory.mktemp("small"), *SMALL) as server:
        yield server.wait_ready()


def families(server):
    """For each family the sum of its samples' values."""
    text = httpx.get(server.url + "/metrics", timeout=5).text
    return {
        family.name: sum(sample.value for sample in family.samples)
        for family in text_string_to_metric_families(text)
    }


@contextlib.contextmanager
def watching(server):
    """Every family that had another value at any time within the block."""
    before, moved, stop = families(server), set(), threading.Event()

    def watch():
        while not stop.is_set():
            moved.update(name for name, value in families(server).items() if value != before.get(name, 0))
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield moved
    finally:
        stop.set()
        thread.join()
    moved.update(name for name, value in families(server).items() if value != before.get(name, 0))


def drive(server):
    """More than the server can hold, some of it twice, and what it has to refuse."""
    statuses = []

    def one(number):
        prompt = f"{number % 6} " * 30
        statuses.append(server.post("/v1/completions", ASK | {"prompt": prompt}).status_code)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def test_every_metric_moves_under_traffic(small):
    with watching(small) as moved:
        statuses = drive(small)
        for _ in range(2):  # the second one finds the first one's prefix
            small.post("/v1/completions", ASK | {"prompt": "again " * 10, "max_tokens": 1})
    assert {200, 503} <= set(statuses), "the traffic is not what the test needs"
    promised = set(families(small)) - STILL
    promised = {name for name in promised if not name.startswith(STILL_PREFIXES)}
    assert promised - moved - {"vllm:cache_config_info"} == set()


def test_names_and_buckets_are_what_dashboards_read(small):
    text = httpx.get(small.url + "/metrics", timeout=5).text
    bounds = {}
    for name, bound in re.findall(r'^(\S+?)_bucket\{[^}]*le="([^"]+)"', text, flags=re.MULTILINE):
        bounds.setdefault(name, []).append(float(bound))
    assert {name: bounds[name][:-1] for name in BUCKETS} == BUCKETS
    for family in text_string_to_metric_families(text):
        labels = set().union(*(sample.labels for sample in family.samples))
        if family.name.startswith("vllm:") and family.samples:
            assert {"model_name", "engine"} <= labels, family.name


def test_the_cache_says_how_it_is_set_up(small):
    labels = {"block_size": "16", "num_gpu_blocks": "24", "enable_prefix_caching": "True"}
    assert small.metric("vllm:cache_config_info", **labels) == 1


def test_without_a_gpu_there_is_no_series_of_one_but_the_reason(small):
    text = httpx.get(small.url + "/metrics", timeout=5).text
    assert "llm_gpu_memory_bytes{" not in text and "llm_gpu_utilization_ratio{" not in text
    assert re.search("# HELP llm_gpu_memory_bytes .*no NVIDIA GPU", text)


def test_a_gpu_is_shown_by_number_and_kind_until_its_word_is_old():
    now = [100.0]
    gpus = GpuCollector({"model": "tiny"}, clock=lambda: now[0])
    gpus.take((GpuSample("0", {"used": 5, "free": 3, "total": 8}, 0.25),))

    def shown():
        return {
            (sample.name, sample.labels["gpu_id"], sample.labels.get("kind")): sample.value
            for family in gpus.collect()
            for sample in family.samples
        }

    assert shown() == {
        ("llm_gpu_memory_bytes", "0", "used"): 5,
        ("llm_gpu_memory_bytes", "0", "free"): 3,
        ("llm_gpu_memory_bytes", "0", "total"): 8,
        ("llm_gpu_utilization_ratio", "0", None): 0.25,
    }
    now[0] += 60
    assert shown() == {}, "a driver that hangs looks like a GPU that idles"


def test_every_metric_is_on_the_page_and_every_one_of_the_page_exists(small):
    text = httpx.get(small.url + "/metrics", timeout=5).text
    # Speculation has a page of its own.
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.startswith(("llm_spec_decode_", "vllm:spec_decode_"))
    }
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    table = page.partition("## Metrics")[2].partition("### Exemplars")[0]
    named = set(re.findall(r"`((?:llm_|vllm:)\w+)`", table))
    assert named == served
