"""Hours of overload, in minutes: nothing grows or leaks, and only the requests over the limits are
refused.
"""

import asyncio
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server import tiny_model
from tests.server.launch import Server
from tests.soak import swarm, timer

SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "2")) / 3  # there are three of them
pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 180)]

MAX_RUNNING, MAX_QUEUED, CLIENTS = 8, 20, 48
URGENT_SHARE = 0.02
PLENTY = ("--num-gpu-blocks-override", "1024")
# Less than the eight grow to. Urgent requests are admitted all the same, and others have to give way.
SCARCE = ("--num-gpu-blocks-override", "80", "--scheduling-policy", "priority")
# The same with somewhere to go for what is lost: 64 blocks of the host, 32 of a disk.
SWAPPING = (*SCARCE, "--preemption-mode", "swap", "--kv-offload-host-bytes", "262144")
SWAPPING = (*SWAPPING, "--kv-offload-disk-path", "{directory}", "--kv-offload-disk-bytes", "131072")


@dataclass
class Soaked:
    """One overload: what became of the requests, what was seen meanwhile, and the metrics after it."""

    tally: swarm.Tally
    depths: list[float]
    active: list[float]
    unaccounted: list[float]
    megabytes: dict[str, list[float]]
    metrics: dict[str, float]
    lateness: list[float]  # of the machine's own timers, in seconds
    tier_blocks_left: list[float]  # on the host and on the disk, where there are such


def resident_megabytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def samples_of(url):
    """Every sample of /metrics by name, summed over labels, with a histogram's buckets by their bound."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(url + "/metrics", timeout=60)).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + (f"<{sample.labels['le']}" if "le" in sample.labels else "")
            found[name] = found.get(name, 0.0) + sample.value
    return found


async def observe(server, children, depths, active, unaccounted, megabytes):
    """Look twice a second while clients ask: memory of each process, and the number of active requests."""
    end = asyncio.get_running_loop().time() + SECONDS
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.5)
        metrics = await samples_of(server.url)
        depths.append(max(metrics["llm_active_requests"] - MAX_RUNNING, metrics["llm_queue_depth"], 0))
        active.append(metrics["llm_active_requests"])
        unaccounted.append(metrics["llm_kv_blocks_unaccounted"])
        for name, pid in children.items():
            megabytes.setdefault(name, []).append(resident_megabytes(pid))


async def soak(server, children, urgent_share):
    depths, active, unaccounted, megabytes = [], [], [], {}
    tally, _ = await asyncio.gather(
        swarm.run(server.url + "/v1", num_clients=CLIENTS, seconds=SECONDS, urgent_share=urgent_share),
        observe(server, children, depths, active, unaccounted, megabytes),
    )
    return tally, depths, active, unaccounted, megabytes


def tier_blocks_left(server):
    """Blocks of the lower tiers that are still in use at the end, although no request can find them."""
    for _ in range(2):  # an answer in between takes in what was still on its way from the disk
        assert server.post("/reset_prefix_cache", {}).status_code == 200
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}).is_success
    server.wait("it is idle again", lambda: server.statusz()["running"] == 0)
    return [server.metric("llm_kv_tier_used_blocks", tier=tier) for tier in ("host", "disk")]


@pytest.fixture(
    scope="module", params=[PLENTY, SCARCE, SWAPPING], ids=["plenty", "scarce", "scarce, swapped"]
)
def soaked(tmp_path_factory, request):
    directory = tmp_path_factory.mktemp("soak")
    flags = ("--max-num-seqs", str(MAX_RUNNING), "--max-num-queued-reqs", str(MAX_QUEUED), *request.param)
    flags = tuple(flag.format(directory=directory) for flag in (*flags, "--api-keys-dir", "{directory}/keys"))
    (directory / "keys").mkdir()
    (directory / "keys" / "swarm").write_text(
        "none\nadmin: true\nhighest-priority: high\n"
    )  # the key that the clients send
    with Server(tiny_model.write(directory / "tiny"), directory, "--max-model-len", "1024", *flags) as server:
        server.wait_ready()
        children = server.children()
        with subprocess.Popen([sys.executable, timer.__file__], stdout=subprocess.PIPE, text=True) as clock:
            try:
                tally, depths, active, unaccounted, megabytes = asyncio.run(
                    soak(server, children, 0.0 if request.param is PLENTY else URGENT_SHARE)
                )
            finally:
                clock.terminate()
            lateness = [float(line) for line in clock.stdout.read().splitlines()[:-1]]
        server.wait("it is idle", lambda: server.metric("llm_active_requests") == 0)
        server.wait("the engine is idle", lambda: server.statusz()["running"] == 0)
        assert server.children() == children, "a process was replaced"
        left = tier_blocks_left(server) if request.param is SWAPPING else []
        metrics = asyncio.run(samples_of(server.url))
        return Soaked(tally, depths, active, unaccounted, megabytes, metrics, lateness, left)


def test_every_request_is_answered_or_shed(soaked):
    tally = soaked.tally
    assert not tally.broken
    assert tally.answered > 50
    assert tally.given_up > 5, "some clients hung up"
    assert tally.shed, "it was no overload"


def test_memory_stays_flat(soaked):
    for name, megabytes in soaked.megabytes.items():
        quarter = len(megabytes) // 4
        early = statistics.median(megabytes[quarter : 2 * quarter])
        late = statistics.median(megabytes[-quarter:])
        assert late - early < max(8, 0.03 * early), f"{name} grew from {early:.0f} to {late:.0f} MB"


def test_no_block_and_no_place_is_lost(soaked):
    assert soaked.metrics["llm_kv_cache_utilization"] == 0
    assert soaked.metrics["llm_queue_depth"] == 0
    assert soaked.metrics["llm_running_requests"] == 0
    assert soaked.unaccounted and not any(soaked.unaccounted)
    assert not any(soaked.tier_blocks_left)


def test_requests_are_shed_as_often_as_the_queue_is_deep(soaked):
    odds = [min(1.0, max(0.0, (depth / MAX_QUEUED - 0.8) / 0.2)) for depth in soaked.depths]
    by_depth = soaked.tally.shed["load_shed"] + soaked.tally.shed["queue_full"]
    assert abs(by_depth / soaked.tally.asked - statistics.mean(odds)) < 0.12
    assert max(soaked.active) <= MAX_RUNNING + MAX_QUEUED, "preemption lengthens the queue, not this"


def test_the_event_loop_is_late_no_oftener_than_the_machine_itself(soaked):
    total = soaked.metrics["llm_event_loop_lag_seconds_count"]
    late = 1 - soaked.metrics["llm_event_loop_lag_seconds_bucket<0.05"] / total
    machine = sum(one > 0.05 for one in soaked.lateness) / len(soaked.lateness)
    assert late < machine + 0.01, f"{late:.1%} of timers were more than 50 ms late, {machine:.1%} elsewhere"


def test_what_lacks_memory_was_preempted(soaked, request):
    if "scarce" in request.node.callspec.id:
        assert soaked.metrics["llm_preemptions_total"] > 10
        assert soaked.tally.shed["memory_pressure"]
        assert (soaked.metrics.get("llm_swapped_requests_total", 0) > 10) == bool(soaked.tier_blocks_left)
    else:
        assert soaked.metrics["llm_preemptions_total"] == 0
        assert soaked.tally.shed["load_shed"]
