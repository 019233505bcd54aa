"""The vectors of whole batches, against transformers: every family, every pooling, texts of mixed lengths."""

import json
import random

import numpy as np
import pytest
import torch

from quire_server.core.request import PoolingParams
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, StartedRow, Step
from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.runner.config import RunnerConfig
from quire_server.runner.pooling_runner import PoolingRunner
from tests.server.embeddings import embedders

LENGTHS = (1, 7, 7, 33, 90, 2)
POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


def load(directory, pooling="auto", **options):
    return PoolingRunner.load(
        directory, RunnerConfig(device="cpu", **options), pooling, lambda loaded, total: None
    )


def run(runner, texts, asked=()):
    """The vectors of texts that are one step, in reverse order of their rows."""
    asked = asked or [PoolingParams()] * len(texts)
    sampling = SamplingParams(max_tokens=1)
    started = [
        StartedRow(row, f"r{row}", tuple(tokens), len(tokens), (), sampling, 0, each)
        for row, (tokens, each) in enumerate(zip(texts, asked, strict=True))
    ]
    rows = tuple(range(len(texts)))[::-1]
    lengths = tuple(len(texts[row]) for row in rows)
    step = Step(1, tuple(started), (), rows, (0,) * len(rows), lengths, (1,) * len(rows))
    result = runner.launch(step)()
    return [np.frombuffer(result.pooled[row], "<f4") for row in range(len(texts))], result


def texts():
    choose = random.Random(7)
    return [[choose.randrange(4, embedders.VOCAB) for _ in range(length)] for length in LENGTHS]


def pooled(states, pooling):
    return {"cls": states[0], "mean": states.mean(0), "last": states[-1]}[pooling]


@pytest.mark.parametrize("kind", embedders.CONFIGS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_vectors_of_a_batch_are_those_of_transformers_for_each_text_alone(tmp_path, kind, pooling):
    directory = embedders.write(tmp_path / "m", kind, pooling=pooling, normalize=pooling != "lasttoken")
    inputs = texts()
    vectors, _ = run(load(directory), inputs)
    for tokens, vector in zip(inputs, vectors, strict=True):
        expected = pooled(embedders.states(directory, tokens), POOLINGS[pooling])
        if pooling != "lasttoken":
            expected = expected / expected.norm()
        assert np.abs(vector - expected.numpy()).max() <= 1e-4


@pytest.mark.parametrize("kind", embedders.CONFIGS)
def test_weights_that_are_rounded_to_int8_turn_a_vector_by_little(tmp_path, kind):
    directory = embedders.write(tmp_path / "m", kind, pooling="mean_tokens", normalize=True)
    runner, inputs = load(directory, quantization="int8"), texts()
    assert runner.quantization == "int8"
    for tokens, vector in zip(inputs, run(runner, inputs)[0], strict=True):
        expected = embedders.states(directory, tokens).mean(0)
        cosine = float(vector @ (expected / expected.norm()).numpy())
        assert 0.99 < cosine < 1 - 1e-7


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("is_identity", [False, True])
def test_the_scores_of_a_cross_encoder_are_those_of_transformers(tmp_path, kind, is_identity):
    directory = embedders.write(tmp_path / "m", kind, cross_encoder=True)
    if is_identity:
        config = json.loads((directory / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
        (directory / "config.json").write_text(json.dumps(config))
    inputs, asked = texts()[1:], [PoolingParams(second_text_at=at) for at in (3, 0, 20, 60, 1)]
    runner = load(directory)
    scores, _ = run(runner, inputs, asked)
    assert runner.pooling == "score"
    for tokens, each, found in zip(inputs, asked, scores, strict=True):
        at = each.second_text_at or len(tokens)
        raw = embedders.score(directory, tokens, [0] * at + [1] * (len(tokens) - at))
        expected = raw if is_identity else torch.sigmoid(raw)
        assert abs(found[0] - expected.item()) <= 1e-4


def test_fewer_dimensions_are_cut_off_before_the_vector_is_normalised(tmp_path):
    runner = load(embedders.write(tmp_path / "m", "bert", pooling="mean_tokens"))
    tokens = texts()[3]
    (whole, part), _ = run(runner, [tokens, tokens], [PoolingParams(), PoolingParams(dimensions=5)])
    assert len(whole) == 32 and len(part) == 5
    assert np.allclose(part, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert np.isclose(np.linalg.norm(part), 1, atol=1e-6)


def test_a_decoder_is_read_with_and_without_its_head_and_the_prefix_of_its_tensors(tmp_path):
    bare = embedders.write(tmp_path / "bare", "qwen3")
    assert "model.embed_tokens.weight" not in embedders.tensor_names(bare)
    full = embedders.write_with_head(tmp_path / "full")
    assert "lm_head.weight" in embedders.tensor_names(full)
    (one,), _ = run(load(bare), texts()[3:4])
    (other,), _ = run(load(full), texts()[3:4])
    assert one.shape == other.shape and np.isclose(np.linalg.norm(other), 1, atol=1e-6)


def test_a_damaged_weight_fails_every_text_with_a_reason_of_the_engine(tmp_path):
    runner = load(embedders.write(tmp_path / "m", "bert"))
    runner.damage_weight()
    _, result = run(runner, texts())
    assert set(result.failures.values()) == {NOT_FINITE} and len(result.failures) == len(LENGTHS)


def test_the_longest_text_is_the_models_and_that_of_sentence_transformers(tmp_path):
    assert load(embedders.write(tmp_path / "bert", "bert")).max_model_len == 96
    directory = embedders.write(tmp_path / "xlm", "xlm-roberta", pooling="mean_tokens")
    assert load(directory).max_model_len == 94  # positions begin behind the padding's
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    assert load(directory).max_model_len == 20
    with pytest.raises(ConfigError, match="max-model-len 21 is more than the 20 tokens"):
        load(directory, max_model_len=21)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            "pooling_mode_max_tokens is not supported",
        ),
        ("1_Pooling/config.json", "{}", "no pooling is not supported"),
        (
            "modules.json",
            '[{"type": "sentence_transformers.models.Dense"}]',
            "module 'Dense' is not supported",
        ),
        ("modules.json", "[1]", "modules.json is no list of modules"),
        ("sentence_bert_config.json", '{"max_seq_length": "long"}', "max_seq_length is no length"),
    ],
)
def test_a_file_that_would_change_the_vectors_and_is_not_understood_is_refused(tmp_path, name, text, error):
    directory = embedders.write(tmp_path / "m", "bert", pooling="mean_tokens")
    (directory / name).write_text(text)
    with pytest.raises((ConfigError, ModelCorruptError), match=error):
        load(directory)


def test_the_flag_chooses_another_pooling_than_the_files(tmp_path):
    directory = embedders.write(tmp_path / "m", "bert", pooling="mean_tokens")
    (vector,), _ = run(load(directory, "cls"), texts()[3:4])
    expected = embedders.states(directory, texts()[3])[0]
    assert np.abs(vector - (expected / expected.norm()).numpy()).max() <= 1e-4


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    directory = embedders.write(tmp_path / "m", "bert", cross_encoder=True)
    config = json.loads((directory / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="2 labels"):
        load(directory)
