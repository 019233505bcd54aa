"""Every part of `make bench` runs on a small random model, so that it still works when it is needed.

Only llama.cpp is left out, since it takes minutes to build.
"""

import pytest

from bench import grammars, kv_waste, prefix, quality, quantized, scheduler, speculation
from bench.baselines import Transformers
from bench.batching import batching
from bench.compare import Comparison
from bench.engine import Quire
from bench.interference import interference
from tests.server import tiny_model
from tests.server.quantize import small_models


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def comparison(directory):
    theirs, ours = Transformers(directory), Quire(directory, quantization="int8")
    makers = {"transformers": theirs, "llama.cpp's place": theirs, "quire auto int8": ours}
    return Comparison({name: lambda streams, engine=engine: engine for name, engine in makers.items()}, 250)


def table_rows(text):
    """The rows of a Markdown table: first cell -> the other cells."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_engines_are_compared(comparison):
    for text in (comparison.decode(16, (1, 3), 4, repeats=1), comparison.prefill((16,))):
        assert {"transformers", "quire auto int8", "int8 / best llama.cpp"} <= set(table_rows(text))


def test_decoding_is_measured_for_each_number_of_remaining_streams(comparison):
    table = table_rows(comparison.decode_leaving(16, (1, 2, 4), steps_each=3))
    assert table["tok/s: median (best step)"] == ["x1", "x2", "x4"]


@pytest.mark.parametrize("engine", [Transformers, Quire])
def test_each_step_has_the_number_of_its_rows(engine, directory):
    _, steps = engine(directory).run([[7] * 16, [8] * 16, [9] * 16], [6, 4, 4])
    assert [rows for rows, _ in steps] == [3, 3, 3, 1, 1]


@pytest.mark.deep
def test_batching_is_measured(directory):
    text = batching(directory, eights=1, sizes=(1, 2))
    assert table_rows(text)["continuous"][-1] == "1.00x"


def test_a_long_prompt_among_streams_is_measured(directory):
    assert "one chunk" in interference(directory, pieces=1)


def test_quality_is_measured(directory):
    assert table_rows(quality.compare(directory, count=1))["float32"][1] == "100.0 %"


def test_quantised_checkpoints_are_measured(tmp_path):
    small_models.build(tmp_path)
    rows = table_rows(quantized.report(tmp_path, windows=1, text="Some text to calibrate with. " * 20))
    assert {"fp8", "int8", "awq", "gptq", "int8, as served on this CPU", "4 bits to the nearest"} <= set(rows)


def test_scheduling_is_measured():
    assert "fcfs" in table_rows(scheduler.table())


@pytest.mark.parametrize("section", ["ngram", "draft-model", "streams"])
def test_speculation_is_measured(section, directory, monkeypatch):
    for name, value in (("DIRECTORY", directory), ("LENGTH", 12), ("LONGEST", 2), ("PAIRS", 2)):
        monkeypatch.setattr(speculation, name, value)
    table = table_rows(speculation.SECTIONS[section][1]())
    assert all(table[text][-1].endswith("x") for text in ("repetitive", "open"))


def test_grammars_are_measured(directory):
    table = table_rows(grammars.table(directory, steps=3))
    assert all(float(cell) > 0 for form in grammars.FORMS for cell in table[form])


def test_kv_memory_is_measured():
    assert len(table_rows(kv_waste.table())) == 5


def test_the_prefix_cache_is_measured(directory):
    assert "tokens a second" in prefix.report(directory)
