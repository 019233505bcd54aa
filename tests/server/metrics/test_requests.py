"""/metrics under traffic: all that is promised there moves, under the names and buckets that others read."""

import contextlib
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire_server.metrics.gpu import GpuCollector, GpuSample
from quire_server.metrics.requests import Metrics
from tests.server.launch import NO_TLS, Server

ASK = {"model": "tiny", "max_tokens": 250, "ignore_eos": True, "temperature": 0}
KEPT = {"cache_control": {"type": "ephemeral"}}
# Rows and blocks for two of the answers below, so that others queue and some have to give way; lower tiers
# that overflow as well, and drafts.
SMALL = ("--num-gpu-blocks-override", "24", "--max-num-seqs", "4", "--max-num-queued-reqs", "8")
LOWER = ("--preemption-mode", "swap", "--kv-offload-host-bytes", str(256 << 10), "--kv-offload-disk-bytes")
DRAFTS = ("--speculative-method", "ngram", "--prompt-lookup-min", "1")

# What only a fault, a deadline, a drain, a GPU, ranks, adapters or a role in transfers moves: see
# test_prefill_decode, test_ranks, serving/test_adapters, monitoring/test_dashboard,
# test_degradation, test_overload, test_lifecycle,
# runner/test_tiers, engine/test_engine, and below. Sizes and settings do not move.
STILL = {
    "llm_adapter_failed",
    "llm_adapter_loaded",
    "llm_adapter_requests",
    "llm_adapter_resident",
    "llm_adapter_slot_loads",
    "llm_cancelled_requests",
    "llm_deadline_cut_answers",
    "llm_degraded_requests",
    "llm_drained_requests",
    "llm_gpu_memory_bytes",
    "llm_gpu_utilization_ratio",
    "llm_kv_blocks_unaccounted",
    "llm_kv_tier_blocks",
    "llm_kv_tier_corrupt_blocks",
    "llm_kv_tier_failed",
    "llm_kv_transfer_blocks",
    "llm_kv_transfer_failures",
    "llm_kv_transfer_held",
    "llm_kv_transfers",
    "llm_model_load_seconds",
    "llm_rank_busy_seconds",
    "llm_rank_exchanged_bytes",
    "llm_rank_silence_seconds",
    "llm_rank_steps",
    "vllm:cache_config_info",
}

REQUEST_SECONDS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60]
REQUEST_SECONDS += [120, 240, 480, 960, 1920, 7680]
TTFT_SECONDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
TTFT_SECONDS += [1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560]
TOKEN_SECONDS = [
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
]
STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200]  # of a context of 24 blocks of 16
BUCKETS = {
    "llm_ttft_seconds": [0.1, 0.2, 0.5, 1, 2, 5, 10],
    "llm_request_latency_seconds": [0.5, 1, 2, 5, 10, 30, 60],
    "vllm:time_to_first_token_seconds": TTFT_SECONDS,
    "vllm:inter_token_latency_seconds": TOKEN_SECONDS,
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
# vLLM's other names: the type, and the labels besides its model and engine.
VLLM = {
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:cache_config_info": (
        "gauge",
        {"block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"},
    ),
    "vllm:prompt_tokens_total": ("counter", set()),
    "vllm:generation_tokens_total": ("counter", set()),
    "vllm:request_success_total": ("counter", {"finished_reason"}),
    "vllm:num_preemptions_total": ("counter", set()),
    "vllm:prefix_cache_queries_total": ("counter", set()),
    "vllm:prefix_cache_hits_total": ("counter", set()),
    "vllm:spec_decode_num_drafts_total": ("counter", set()),
    "vllm:spec_decode_num_draft_tokens_total": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens_total": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("counter", {"position"}),
}
# Ours that have more labels than the model's.
LABELS = {
    "llm_requests": {"model", "status"},
    "llm_requests_refused": {"model", "reason"},
    "llm_degraded_requests": {"model", "reason"},
    "llm_kv_tier_blocks": {"model", "tier"},
    "llm_kv_tier_used_blocks": {"model", "tier"},
    "llm_kv_tier_stored_blocks": {"model", "tier"},
    "llm_kv_tier_loaded_blocks": {"model", "tier"},
    "llm_kv_tier_evicted_blocks": {"model", "tier"},
    "llm_kv_tier_failed": {"model", "tier"},
    "llm_spec_decode_accepted_tokens_per_pos": {"model", "position"},
}


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    lower = (*LOWER, str(256 << 10), "--kv-offload-disk-path", str(directory))
    with Server(tiny, directory, *SMALL, *lower, *DRAFTS) as server:
        yield server.wait_ready()


def page(server):
    return httpx.get(server.url + "/metrics", timeout=60, verify=NO_TLS).text


def families(server):
    """For each family the sum of its samples' values."""
    return {
        family.name: sum(sample.value for sample in family.samples)
        for family in text_string_to_metric_families(page(server))
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


def teach_that_answers_are_short(server):
    """So that it admits more requests than have room for long answers, and has to preempt."""
    short = {"max_tokens": 250, "structured_outputs": {"regex": "ab"}}
    for _ in range(30):
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "7 " * 30} | short).is_success


def drive(server):
    """More than the server can hold, some of it twice, and what it has to refuse."""
    teach_that_answers_are_short(server)
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


def drafted_in_vain(server):
    """How often drafting has paused, after an answer in which nothing recurs."""
    server.post("/v1/completions", ASK | {"prompt": "x", "temperature": 2})
    return server.metric("llm_spec_decode_pauses_total")


def test_every_metric_moves_under_traffic(small):
    with watching(small) as moved:
        statuses = drive(small)
        for _ in range(2):  # the second one finds the first one's prefix
            small.post("/v1/completions", ASK | {"prompt": "again " * 10, "max_tokens": 1})
        for letter in "abcd":  # more than may be pinned
            small.post("/v1/completions", ASK | {"prompt": letter * 90, "max_tokens": 1} | KEPT)
        small.wait("a pause", lambda: drafted_in_vain(small))
    assert {200, 503} <= set(statuses), "the traffic is not what the test needs"
    assert set(families(small)) - STILL - moved == set()


def test_names_and_buckets_are_what_dashboards_read(small):
    text = page(small)
    bounds = {}
    for name, bound in re.findall(r'^(\S+?)_bucket\{[^}]*le="([^"]+)"', text, flags=re.MULTILINE):
        bounds.setdefault(name, []).append(float(bound))
    assert {name: bounds[name][:-1] for name in BUCKETS} == BUCKETS


def test_types_and_labels_are_those_of_vllm_and_those_that_are_promised(small):
    drive(small)
    small.wait("drafts", lambda: "llm_spec_decode_accepted_tokens_per_pos_total{" in page(small))
    found, ours = {}, {}
    for family in text_string_to_metric_families(page(small)):
        labels = set().union(*(sample.labels for sample in family.samples)) - {"le"}
        if not family.name.startswith("vllm:"):
            ours[family.name] = labels
        elif family.type == "histogram":
            assert labels == {"model_name", "engine"} and family.name in BUCKETS
        else:
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = family.type, labels - {"model_name", "engine"}
            assert {"model_name", "engine"} <= labels, name
    assert found == VLLM
    # No series without a GPU, with one rank, or without adapters.
    without = {name for name in ours if name.startswith(("llm_gpu_", "llm_rank_", "llm_adapter_requests"))}
    assert len(without) == 7
    assert ours == {name: LABELS.get(name, {"model"}) for name in ours} | dict.fromkeys(without, set())
    assert ours.keys() >= LABELS.keys()


def test_what_the_end_of_a_server_moves_is_counted():
    """By the same calls that write the log line's status, which test_lifecycle reads."""
    metrics = Metrics("tiny")
    metrics.cancelled()
    metrics.drained()
    lines = metrics.exposition("")[0].decode().splitlines()
    assert {f'llm_{what}_requests_total{{model="tiny"}} 1.0' for what in ("cancelled", "drained")} <= set(
        lines
    )


def test_the_cache_says_how_it_is_set_up(small):
    labels = {"block_size": "16", "num_gpu_blocks": "24", "enable_prefix_caching": "True"}
    assert small.metric("vllm:cache_config_info", **labels) == 1


def test_without_a_gpu_there_is_no_series_of_one_but_the_reason(small):
    text = page(small)
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
    gpus.set_engine_memory({"weights": 4, "kv": 2})
    assert shown() == {
        ("llm_gpu_memory_bytes", "0", "weights"): 4,
        ("llm_gpu_memory_bytes", "0", "kv"): 2,
    }


def test_every_metric_is_on_the_page_and_every_one_of_the_page_exists(small):
    text = page(small)
    # Speculation has a page of its own.
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.startswith(("llm_spec_decode_", "vllm:spec_decode_"))
    }
    written = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    table = written.partition("## Metrics")[2].partition("### Exemplars")[0]
    named = set(re.findall(r"`((?:llm_|vllm:)\w+)`", table))
    # Endpoint pickers read it; without adapters there is nothing to say.
    assert named - {"vllm:lora_requests_info"} == served
