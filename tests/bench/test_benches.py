"""Every part of `make bench` runs on a small random model, so that it still works when it is needed.

Only llama.cpp is left out, since it takes minutes to build.
"""

import gguf
import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig

from bench import (
    arrivals,
    grammars,
    int4,
    kv_waste,
    prefix,
    quality,
    quantized,
    random_llama,
    scheduler,
    speculation,
)
from bench.baselines import GREEDY, SAMPLED, Drawing, Transformers
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


@pytest.mark.parametrize(
    ("engine", "drawing"),
    [
        (Transformers, GREEDY),
        (Transformers, SAMPLED),
        (Quire, GREEDY),
        (Quire, SAMPLED),
        (Quire, Drawing(schema=grammars.LIST_SCHEMA)),
    ],
)
def test_each_step_has_the_number_of_its_rows(engine, drawing, directory):
    _, steps = engine(directory, drawing=drawing).run([[7] * 16, [8] * 16, [9] * 16], [6, 4, 4])
    assert [rows for rows, _ in steps] == [3, 3, 3, 1, 1]


class Echo:
    """Slots whose tokens are their positions."""

    streams = 2

    def __init__(self):
        self.held, self.most = set(), 0

    def clear(self):
        self.held = set()

    def prefill(self, slot, prompt):
        assert slot not in self.held
        self.held.add(slot)
        self.most = max(self.most, len(self.held))
        return len(prompt)

    def decode(self, rows):
        assert set(rows) == self.held and all(token == position for token, position in rows.values())
        return {slot: token + 1 for slot, (token, _) in rows.items()}

    def release(self, slot):
        self.held.remove(slot)


def test_requests_that_arrive_get_all_their_tokens_after_they_came(directory):
    requests = [arrivals.Arrival(0.002 * n, [7] * (5 + n), 3 + n % 3) for n in range(6)]
    slots, engine = Echo(), Quire(directory, drawing=SAMPLED)
    for times in (
        arrivals.serve(arrivals.Slotted(slots), requests),
        arrivals.serve(arrivals.Scheduled(engine), requests),
        arrivals.OneAfterTheOther(engine)(requests),
    ):
        assert [len(each) for each in times] == [one.new_tokens for one in requests]
        assert all(
            each == sorted(each) and each[0] > one.at for each, one in zip(times, requests, strict=True)
        )
    assert slots.most <= slots.streams


def test_one_after_the_other_a_request_waits_for_the_one_before():
    class Steady:
        def run(self, prompts, answers):
            return 1.0, [(1, 0.5)] * (answers[0] - 1)

    requests = [arrivals.Arrival(at, [7], 3) for at in (0.0, 1.0, 9.0)]
    assert arrivals.OneAfterTheOther(Steady())(requests) == [
        [1.0, 1.5, 2.0],
        [3.0, 3.5, 4.0],
        [10.0, 10.5, 11.0],
    ]


def test_arrivals_have_the_rate_and_the_lengths_that_are_printed():
    found = arrivals.trace(4.0, 4000, 250)
    assert found[-1].at == pytest.approx(1000, rel=0.1)
    assert [each[1:] for each in arrivals.trace(0.5, 4000, 250)] == [each[1:] for each in found]
    for (shortest, median, longest), lengths in (
        (arrivals.PROMPT, sorted(len(one.prompt) for one in found)),
        (arrivals.ANSWER, sorted(one.new_tokens for one in found)),
    ):
        assert shortest <= lengths[0] and lengths[-1] <= longest
        assert lengths[2000] == pytest.approx(median, rel=0.1)


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
    served = {"int8, as served on this CPU", "awq, as served by Int4", "gptq, as served by Int4"}
    assert {"fp8", "int8", "awq", "gptq", "4 bits to the nearest", *served} <= set(rows)


def test_scheduling_is_measured(monkeypatch):
    monkeypatch.setattr(scheduler, "STEPS", 50)
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


def test_the_prefix_cache_is_measured(directory, monkeypatch):
    monkeypatch.setattr(prefix, "REPEATS", 1)
    assert "tokens a second" in prefix.report(directory)


def test_int4_is_compared_by_the_same_prompts_and_by_the_bytes_that_it_reads(directory):
    theirs = Transformers(directory)
    text = int4.compare(
        directory,
        {"llama.cpp's place": lambda streams: theirs},
        length=8,
        new_tokens=4,
        streams=(1, 2),
        repeats=1,
    )
    table = table_rows(text)
    assert all(float(cell[:-1]) > 0 for way in int4.WAYS for cell in table[f"{way} / best llama.cpp"])
    assert all(f"a step in {way} reads" in text for way in int4.WAYS)


def test_the_random_llama_is_the_same_model_for_both_engines(tmp_path):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=300, tie_word_embeddings=False,
    )  # fmt: skip
    directory = random_llama.write(tmp_path / "model", config)
    reader = gguf.GGUFReader(random_llama.write_gguf(directory, tmp_path / "model.gguf"))
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    tensors = load_file(directory / "model.safetensors")
    assert len(stored) == len(tensors)
    down = tensors["model.layers.0.mlp.down_proj.weight"].half().numpy()
    assert (stored["blk.0.ffn_down.weight"] == down).all()
    assert Quire(directory, quantization="int4").run([[7] * 8], [3])[1]
