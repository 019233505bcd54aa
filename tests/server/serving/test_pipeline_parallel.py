"""A model whose layers are divided among processes: the answers of one process over HTTP, and what a stage's
end does.
"""

import os
import shutil
import signal
import time

import pytest

from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.models import families
from tests.server.serving.test_lost_ranks import BUSY_SECONDS, STOPPED, Stream, left_behind, shared_memory
from tests.server.serving.test_tensor_parallel import EXACT, answers, bodies, same


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Five layers, so that stages are uneven."""
    directory = tmp_path_factory.mktemp("models")
    tiny = tiny_model.write(directory / "with-a-tokenizer")
    families.build(
        directory / "tiny",
        "Llama",
        {"num_hidden_layers": 5, "vocab_size": 258, "max_position_embeddings": 2048},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, directory / "tiny")
    return directory / "tiny"


def served(model, directory, stages, *flags, fault=""):
    directory.mkdir(exist_ok=True)
    return Server(model, directory, *EXACT, "--pipeline-parallel-size", str(stages), *flags, fault=fault)


@pytest.mark.deep
def test_greedy_answers_of_stages_are_those_of_one_process(model, tmp_path):
    wanted = bodies([f"request {i} " * (3 + 3 * i) for i in range(5)])
    tight = ("--max-num-batched-tokens", "24", "--max-num-seqs", "6", "--num-gpu-blocks-override", "100")
    found = []
    for index, flags in enumerate(((1,), (2,), (3, "--tensor-parallel-size", "2"))):
        with served(model, tmp_path / str(index), *flags, *tight).wait_ready() as server:
            assert len(server.ranks()) == (1, 2, 6)[index]
            found.append(answers(server, wanted))
    assert same(found[1], found[0])
    assert same(found[2], found[0])


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("signum", "victim"), [(signal.SIGKILL, 0), (signal.SIGKILL, 2), (signal.SIGSTOP, 1)]
)
def test_when_a_stage_ends_or_stops_all_end_and_each_stream_gets_an_error(model, tmp_path, signum, victim):
    with served(model, tmp_path / "run", 3).wait_ready() as server:
        pids, run_dir = list(server.children().values()), server.run_dir()
        paths, streams = shared_memory(pids), [Stream(server) for _ in range(3)]
        server.wait("streams", lambda: all(len(stream.lines) > 5 for stream in streams))
        began_at = time.monotonic()
        os.kill(server.ranks()[victim], signum)
        assert server.wait_end() in ([137] if signum == signal.SIGKILL else STOPPED)
        took = time.monotonic() - began_at
        assert took <= (2.0 if signum == signal.SIGKILL else 5.0) + BUSY_SECONDS
        assert [stream.error for stream in streams if stream.error is None] == []
        assert left_behind(server, paths, run_dir, pids) == []
        if signum == signal.SIGSTOP:
            assert f"ank {victim}" in server.failure()["message"]


@pytest.mark.deep
def test_a_late_rank_of_a_later_stage_ends_the_server_before_the_deadline_of_stages(model, tmp_path):
    """The ranks of its own stage miss it after three seconds, and leave the others, who would wait for
    minutes. Its beats go on.
    """
    late = "rank_delay:after=40,rank=3,seconds=100"
    with served(model, tmp_path / "run", 2, "--tensor-parallel-size", "2", fault=late).wait_ready(
        120
    ) as server:
        streams = [Stream(server) for _ in range(2)]
        server.wait_fault("rank_delay")
        assert server.wait_end() in STOPPED
        assert [stream.error for stream in streams if stream.error is None] == []
        assert "rank 3" in server.failure()["message"]


@pytest.mark.deep
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("3",), "Set --pipeline-parallel-size to 2 or less."),
        (("11", "--tensor-parallel-size", "3"), "is 33, more than 32 processes: lower one of them"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(model, tmp_path, flags, message):
    two_layers = model.parent / "with-a-tokenizer"
    with served(two_layers, tmp_path, *flags) as server:
        assert server.wait_end() == 2
        assert message in server.log.read_text()
