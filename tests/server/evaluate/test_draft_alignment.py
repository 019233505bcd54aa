"""The acceptance rates that draft-alignment measures are those of speculative decoding."""

import json
from pathlib import Path

import pytest
import torch

from quire_server import termination
from quire_server.__main__ import run
from quire_server.errors import ConfigError
from quire_server.evaluate import draft_alignment
from quire_server.evaluate.draft_alignment import Alignment, agreement
from quire_server.layers.ops import gumbel_sample
from quire_server.runner.loader import Checkpoint
from tests.server import tiny_model
from tests.server.models import families
from tests.server.runner.in_process import load


def test_the_coupled_rate_is_how_often_both_sample_the_same_token() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(1, 40) * 2, torch.randn(1, 40)
    ours, theirs = ours, ours + theirs
    count = 20_000
    seeds, positions, ones = torch.arange(count), torch.full((count,), 7), torch.ones(count)
    drawn = [gumbel_sample(logits.expand(count, -1), ones, seeds, positions) for logits in (ours, theirs)]
    same = float((drawn[0] == drawn[1]).float().mean())
    _, coupled, rejection = (float(value) for value in agreement(ours, theirs))
    assert same == pytest.approx(coupled, abs=0.015)
    distance = 1 - rejection
    assert (1 - distance) / (1 + distance) <= coupled <= rejection
    assert [float(value) for value in agreement(ours, ours)] == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(("mean", "verdict"), [(0.71, "good"), (0.6, "fair"), (0.49, "poor")])
def test_the_lower_of_greedy_and_sampled_acceptance_decides(mean: float, verdict: str) -> None:
    assert Alignment(10, mean, 0.99, 0.99).verdict == Alignment(10, 0.99, mean, 0.99).verdict == verdict
    assert verdict in Alignment(10, mean, 0.99, 0.99).report()


def test_the_command_measures_a_copy_of_the_model_as_a_good_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model.write(tmp_path / "model"))
    text = tmp_path / "text.txt"
    text.write_text("The sky is blue because of the way light is scattered by the air. " * 6)
    assert run(["draft-alignment", "--model", model, "--draft", model, str(text)], {}) == 0
    said = capsys.readouterr().out
    assert "\ngood: " in said and "greedy" in said


def test_a_draft_with_another_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = tiny_model.write(tmp_path / "model"), tiny_model.write(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["a"] = vocabulary["a"], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "text").write_text("some text")
    paths = ["--model", str(model), "--draft", str(other), str(tmp_path / "text")]
    assert run(["draft-alignment", *paths], {}) == termination.EXIT_CODES[termination.Reason.CONFIG_ERROR]
    assert "another tokenizer" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is token .* of the model and .* of the draft"):
        load(model, speculative_model=other)


def test_the_command_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("Llama, tied", "Llama, linear rope, all kv heads"):
        families.make(tmp_path / name, name)
    paths = ["--model", str(tmp_path / "Llama, tied"), "--draft", str(tmp_path / "nowhere"), "none.txt"]
    assert run(["draft-alignment", *paths], {}) != 0
    assert "none.txt" in capsys.readouterr().err
    (tmp_path / "text").write_text("a")
    assert run(["draft-alignment", *paths[:-1], str(tmp_path / "text")], {}) != 0
    assert "nowhere" in capsys.readouterr().err


def test_two_different_checkpoints_agree_less(tmp_path: Path) -> None:
    for name in ("Llama, tied", "Llama, linear rope, all kv heads"):
        families.make(tmp_path / name, name)
    model, other = (
        Checkpoint.open(tmp_path / name, dtype="float32", quantization_name="none")
        for name in ("Llama, tied", "Llama, linear rope, all kv heads")
    )
    tokens = [int(token) for token in torch.randint(2, 211, (300,))]
    assert draft_alignment.measure(model, model, tokens).coupled == pytest.approx(1.0)
    assert draft_alignment.measure(model, other, tokens).verdict == "poor"
