"""A rank that has no memory for a step: all ranks drop the same request, and go on."""

import re
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.models import families

SIZES = {"vocab_size": 258, "intermediate_size": 4096, "max_position_embeddings": 4096}
FLAGS = ("--dtype", "float32", "--quantization", "none", "--max-num-batched-tokens", "4096",
         "--num-gpu-blocks-override", "600", "--tensor-parallel-size", "2")  # fmt: skip
ASKED = {"model": "tiny", "temperature": 0, "ignore_eos": True}
SMALL = ASKED | {"prompt": [5, 6, 7], "max_tokens": 200}
ROOM = 24 << 20  # enough for steps of the small request; one of the large one needs 57 MB at once


def large(rank):
    """A long prompt, another one for each test, so that none of it is cached."""
    return ASKED | {"prompt": [9 + rank + index % 200 for index in range(3500)], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    families.build(model, "Llama", SIZES)
    tiny = tiny_model.write(tmp_path_factory.mktemp("tiny") / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, model)
    with Server(model, tmp_path_factory.mktemp("run"), *FLAGS) as found:
        yield found.wait_ready()


def address_space(pid):
    kilobytes = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes[1]) << 10


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_rank_has_no_memory_for_a_step_all_drop_the_same_request(server, rank):
    expected = server.post("/v1/completions", SMALL).json()["choices"]
    pid = server.ranks()[rank]
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    errors = server.log.read_text().count("out of memory in a step")
    resource.prlimit(pid, resource.RLIMIT_AS, (address_space(pid) + ROOM, most))
    try:
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(server.post, "/v1/completions", body) for body in (SMALL, large(rank))]
            beside, dropped = (one.result() for one in both)
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
    assert server.log.read_text().count("out of memory in a step") == errors + 1
    assert dropped.status_code == 503 and "no memory left" in dropped.text
    assert beside.json()["choices"] == expected
    assert server.post("/v1/completions", large(rank)).status_code == 200
    assert server.post("/v1/completions", SMALL).json()["choices"] == expected
