"""What the model's generation_config.json says about sampling."""

import json

import pytest

from quire_server.api.calls import SamplingDefaults
from quire_server.api.house import sampling_defaults
from quire_server.core.errors import ModelCorruptError
from quire_server.core.model_files import ModelFiles


def defaults(tmp_path, **settings):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return sampling_defaults(ModelFiles.open(tmp_path))


def test_without_the_file_openai_s_defaults_hold(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(ModelFiles.open(tmp_path)) == SamplingDefaults(1.0, 1.0, 0)


def test_what_is_set_is_honoured(tmp_path):
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True, "eos_token_id": 2}
    assert defaults(tmp_path, **settings) == SamplingDefaults(0.6, 0.9, 40)


def test_a_model_that_does_not_sample_is_greedy(tmp_path):
    assert defaults(tmp_path, do_sample=False).temperature == 0.0


@pytest.mark.parametrize("value", ["hot", -1, 1e9, True, [1]])
def test_a_default_that_makes_no_sense_is_a_corrupt_model(value, tmp_path):
    with pytest.raises(ModelCorruptError, match="temperature"):
        defaults(tmp_path, temperature=value)
