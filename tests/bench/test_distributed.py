"""Every part of `python -m bench.distributed` runs on a small model, and ends with what it started."""

import signal
from pathlib import Path

import pytest
from transformers import LlamaConfig

from bench import all_reduce, distributed, rank_exchanges, rank_losses, rank_shards, step_message
from bench.engine_processes import EngineLostError, EngineProcesses
from bench.engine_rates import COLUMNS, rates, rows
from bench.tensor_parallel import GLOO, ONE, SHARED, WEIGHTS, tensor_parallel, write_model
from tests.bench.test_benches import table_rows
from tests.kernels.rank_processes import where_supported

SMALL = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=512,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)


def engines_running():
    commands = (each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline"))
    return sum(b"bench.ordered_engine" in command for command in commands)


class TimedEngine:
    """Takes a second for a prefill, and then the given seconds in turn, those of a round alike."""

    def __init__(self, *seconds: float):
        self._rounds = [each for each in seconds for _ in COLUMNS]

    def run(self, length: int, count: int, new: int):
        taken = self._rounds.pop(0)
        return [{"seconds": 1.0}, *({"seconds": taken} for _ in range(new - 1))]


def test_rates_are_those_of_the_median_round_and_the_fastest_step():
    found, load = rates({"steady": TimedEngine(0.5, 0.5, 0.5), "slow": TimedEngine(1.0, 4.0, 2.0)}, rounds=3)
    assert rows(found) == [
        ["steady", "2 (2)", "16 (16)", "64 (64)", "512 (512)"],
        ["slow", "0 (1)", "4 (8)", "16 (32)", "512 (512)"],
    ]
    assert load.startswith("Load average in the rounds: ")


@pytest.mark.deep
@where_supported
def test_ranks_are_compared_with_one_process():
    rows = table_rows(tensor_parallel(WEIGHTS["float32"], SMALL, rounds=1))
    assert all(float(cell.split()[0]) > 0 for name in (ONE, SHARED, GLOO) for cell in rows[name])
    assert all("x" in cell for cell in rows[f"{SHARED} / one process"])


@pytest.mark.deep
def test_an_engine_that_cannot_start_is_an_error_with_its_reason_and_leaves_no_process(tmp_path):
    write_model(tmp_path, SMALL)
    before = engines_running()
    with pytest.raises(EngineLostError, match="Set --tensor-parallel-size to one of"):
        EngineProcesses(tmp_path, (), ranks=3)
    assert engines_running() == before


def test_an_engine_that_does_not_answer_in_time_is_an_error_and_leaves_no_process(tmp_path):
    write_model(tmp_path, SMALL)
    before = engines_running()
    with pytest.raises(EngineLostError, match="did not load in time"):
        EngineProcesses(tmp_path, (), load_seconds=0.1)
    assert engines_running() == before


@pytest.mark.deep
@where_supported
def test_all_reduces_are_measured(monkeypatch):
    monkeypatch.setattr(all_reduce, "RANKS", (2,))
    assert all(cell.endswith("x") for cell in table_rows(all_reduce.tables())["gloo / recorded"])


def test_the_step_message_is_measured():
    rows = [line for line in step_message.report(rounds=30).splitlines() if line.startswith("| 3 | 256 ")]
    assert float(rows[0].split("|")[-2]) <= 24


@pytest.mark.deep
def test_exchanges_are_counted(monkeypatch):
    monkeypatch.setattr(rank_exchanges, "RANKS", (2,))
    rows = [line for line in rank_exchanges.report().splitlines() if line.startswith("| 2 ")]
    assert len(rows) == 4 * len(rank_exchanges.BATCHES), "prompts and decodes, greedy and drawn"
    assert all(row.endswith(("| 1 of 1 |", "| 3 of 3 |")) for row in rows)


def test_shards_are_measured():
    assert [line.endswith("| yes |") for line in rank_shards.report(SMALL).splitlines()[2:]] == [True] * 4


@pytest.mark.deep
def test_losses_are_measured(monkeypatch):
    monkeypatch.setattr(rank_losses, "LIMITS", {signal.SIGKILL: 60.0})
    (killed,) = (row for name, row in table_rows(rank_losses.report(1)).items() if name == "SIGKILL")
    assert killed[0] == "1 of 1 within 60 s"
    assert killed[2:5] == ["0 of 3", "0", "0"]


def test_the_page_has_every_part_and_says_what_was_not_measured(tmp_path):
    (tmp_path / "shards.avx2.md").write_text("## Measured before\n")
    (tmp_path / "shards.avx512_vnni.md").write_text("## Measured elsewhere\n")
    (tmp_path / "tests.md").write_text("## What tests show\n")
    page = distributed.page(tmp_path)
    parts = ("## Measured before", "## Measured elsewhere", "## What tests show")
    assert all(part in page for part in parts)
    assert page.count("Not measured.") == len(distributed.SECTIONS) - 1
