"""``quire-server quantize``: its output is read by transformers with the same answers, and the loss is
small.
"""

import json
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_server.__main__ import run
from quire_server.errors import QuireServerError
from quire_server.evaluate.perplexity import Quality, measure
from quire_server.layers.linear import LinearShape
from quire_server.layers.quantized.int8 import StoredInt8
from quire_server.model_dir.files import write_manifest
from quire_server.quantize import run as quantizer
from quire_server.quantize import schemes
from quire_server.quantize.schemes import SCHEMES
from quire_server.runner.loader import Checkpoint
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.models import families, settings
from tests.server.quantize import small_models
from tests.server.runner.in_process import InProcessEngine, greedy, load

PROMPTS = [[5, 9, 77], list(range(30, 60)), list(range(120, 160))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "float"
    small_models.build(path, attention_bias=True, mlp_bias=True)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.text(tmp_path_factory.mktemp("text") / "text", 1)


def quantise(model: Path, scheme: str, text: Path, out: Path) -> Path:
    quantizer.run(model, SCHEMES[scheme], text, out, lambda line: None)
    return out


def quality(model: Path, original: Path, seed: int = 2) -> Quality:
    both = (Checkpoint.open(path, dtype="float32", quantization_name="none") for path in (model, original))
    torch.manual_seed(seed)
    return measure(*both, torch.randint(0, small_models.VOCAB, (1000,)).tolist())


@pytest.fixture(scope="module")
def written(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("quantised")
    return {scheme: quantise(model, scheme, text, path / scheme) for scheme in SCHEMES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_it_by_compressed_tensors_and_gives_the_same_answers(
    scheme: str, written: dict[str, Path]
) -> None:
    theirs = compressed.reference(written[scheme])
    engine = InProcessEngine(load(written[scheme]), max_num_batched_tokens=24)
    assert engine.generate(PROMPTS, greedy(12)) == families.answers(theirs, PROMPTS, 12)
    engine.generate(PROMPTS[2:], greedy(1, logprobs=small_models.VOCAB))
    with torch.inference_mode():
        expected = torch.log_softmax(theirs(torch.tensor([PROMPTS[2]])).logits[0, -1], dim=-1)
    ours = torch.tensor([value for _, value in sorted(engine.logprobs["0"][0].top)])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("scheme", "agreement"), [("fp8", 0.4), ("int8", 0.7), ("awq", 0.2), ("gptq", 0.2)])
def test_the_quantised_model_mostly_agrees_with_the_original(
    scheme: str, agreement: float, written: dict[str, Path], model: Path
) -> None:
    assert agreement < quality(written[scheme], model).agreement < 1


@pytest.mark.parametrize("family", settings.FAMILIES)
def test_every_family_can_be_quantised(family: str, text: Path, tmp_path: Path) -> None:
    """With the scheme that rounds least and scales most, so that wrong scales show."""
    small_models.build(tmp_path / "float", family)
    made = quantise(tmp_path / "float", "int8", text, tmp_path / "made")
    assert quality(made, tmp_path / "float").agreement > 0.6


def test_a_bfloat16_model_keeps_its_type(model: Path, text: Path, tmp_path: Path) -> None:
    source = tmp_path / "float"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    document = json.loads((source / "config.json").read_text())
    document["dtype"] = "bfloat16"
    (source / "config.json").write_text(json.dumps(document))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    made = load_file(quantise(source, "awq", text, tmp_path / "made") / "model.safetensors")
    floats = {tensor.dtype for tensor in made.values() if tensor.is_floating_point()}
    assert floats == {torch.bfloat16}
    assert torch.equal(made["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_int8_is_multiplied_by_int8_kernels_as_it_is_stored(written: dict[str, Path]) -> None:
    exact, fast = (load(written["int8"], quantization=name) for name in ("none", "int8"))
    assert (exact.quantization, fast.quantization) == ("compressed-tensors", "compressed-tensors, int8")
    engine = InProcessEngine(fast)
    alone = [engine.generate([prompt], greedy(8))[0] for prompt in PROMPTS]
    assert engine.generate(PROMPTS, greedy(8)) == alone


def test_the_int8_kernel_computes_what_the_stored_numbers_say() -> None:
    torch.manual_seed(0)
    shape = LinearShape(["a", "b"], 128, [32, 16], True, torch.float32, torch.device("cpu"))
    layer = StoredInt8(shape)
    for target in layer.targets().values():
        values = (
            torch.randint(-128, 128, target.shape) if target.dtype == torch.int8 else torch.rand(target.shape)
        )
        target.copy_(values)
    stored = {name: target.float() for name, target in layer.targets().items()}
    x = torch.randn(5, 128)
    expected = torch.cat(
        [
            x @ (stored[f"{part}.weight"] * stored[f"{part}.weight_scale"]).T + stored[f"{part}.bias"]
            for part in ("a", "b")
        ],
        dim=1,
    )
    layer.finish()
    assert (layer(x) - expected).norm() < 0.02 * expected.norm()


def test_all_files_that_serving_needs_are_copied(written: dict[str, Path], model: Path) -> None:
    names = {path.name for path in written["gptq"].iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "quire-manifest.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert (written["gptq"] / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_four_bits_are_in_groups_and_nothing_is_reordered(written: dict[str, Path]) -> None:
    for scheme in ("awq", "gptq"):
        document = json.loads((written[scheme] / "config.json").read_text())["quantization_config"]
        weights = document["config_groups"]["group_0"]["weights"]
        assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, 32, "group")
        assert "actorder" not in weights
        names = load_file(written[scheme] / "model.safetensors").keys()
        assert not any(name.endswith("g_idx") for name in names)


def test_a_small_model_has_groups_of_32_and_others_the_largest_that_divide_their_inputs() -> None:
    assert schemes.group_size(1024, [("a", 1024), ("b", 4096)]) == 32
    assert schemes.group_size(2048, [("a", 2048), ("b", 8192)]) == 128
    assert schemes.group_size(2048, [("a", 2048), ("b", 704)]) == 64
    assert schemes.group_size(2048, [("a", 2048), ("b", 1056)]) == 32


def command(model: Path, scheme: str, out: Path, *more: str) -> int:
    return run(["quantize", str(model), "--scheme", scheme, "--output", str(out), *more], {})


def test_the_commands_report_their_results(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made"
    assert command(model, "int8", out, "--calibration", str(text)) == 0
    said = capsys.readouterr().out
    assert "7 samples of 256 tokens" in said
    assert "layer 2 of 2" in said and f"wrote {out}" in said
    other = small_models.text(tmp_path / "other", 2, 2000)
    assert run(["eval-quality", str(out), "--against", str(model), "--text", str(other)], {}) == 0
    said = capsys.readouterr().out
    assert re.search(r"perplexity +[\d.]+ +\([+-][\d.]+ %\)", said)
    assert re.search(r"same likeliest token +[\d.]+ %", said)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("awq", "short text", "has 40 tokens, and a sample takes"),
        ("awq", "no such text", "cannot be read as UTF-8 text"),
        ("fp8", "occupied", "exists already"),
        ("fp8", "quantised", r"quantised already \(compressed-tensors\)"),
        ("fp8", "nowhere", "There is no model directory"),
        ("fp8", "full", "MB free, and .* are needed"),
    ],
)
def test_errors_are_reported_and_leave_nothing_behind(
    scheme: str,
    change: str,
    message: str,
    model: Path,
    text: Path,
    written: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, place = tmp_path / "out", tmp_path
    (tmp_path / "short").write_text("a" * 40)
    source = {"quantised": written["gptq"], "nowhere": tmp_path / "none"}.get(change, model)
    if change == "occupied":
        out.mkdir()
        (out / "mine").write_text("precious")
    if change == "full":
        usage = namedtuple("usage", "free")
        monkeypatch.setattr(quantizer.shutil, "disk_usage", lambda path: usage(1000))
    before = sorted(place.rglob("*"))
    given = {"short text": tmp_path / "short", "no such text": tmp_path / "none"}.get(change, text)
    assert command(source, scheme, out, "--calibration", str(given)) != 0
    assert re.search(message, capsys.readouterr().err)
    assert sorted(place.rglob("*")) == before


def test_groups_that_do_not_divide_the_inputs_are_refused_by_name(tmp_path: Path, text: Path) -> None:
    small_models.build(tmp_path / "float", intermediate_size=80)
    with pytest.raises(
        QuireServerError, match=r"mlp\.down_proj has 80 inputs, which groups .* do not divide"
    ):
        quantise(tmp_path / "float", "gptq", text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_leaves_nothing_behind(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, layer: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantizer.Calibration, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantise(model, "awq", text, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_found_before_anything_is_computed(
    written: dict[str, Path], model: Path, text: Path, tmp_path: Path
) -> None:
    source = tmp_path / "float"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    write_manifest(source)
    weights = bytearray((source / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (source / "model.safetensors").write_bytes(weights)
    with pytest.raises(QuireServerError, match="sha256"):
        quantise(source, "fp8", text, tmp_path / "out")


def test_models_with_different_tokenizers_are_not_compared(
    model: Path, written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "float"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["a"] = vocabulary["a"], vocabulary["!"]
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = small_models.text(tmp_path / "text", 3, 600)
    assert run(["eval-quality", str(written["fp8"]), "--against", str(source), "--text", str(text)], {}) != 0
    assert "other tokens" in capsys.readouterr().err
