"""config.json as published, as written by transformers, and with all optional keys removed."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

from quire_server.errors import ConfigError
from quire_server.models import registry
from tests.server.models import families
from tests.server.models.published import PUBLISHED
from tests.server.models.variants import VARIANTS

MINIMAL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40_000,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(("document", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read_correctly(document: dict[str, Any], expected: dict[str, Any]) -> None:
    config = registry.parse(document, (2,))
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.num_layers == document["num_hidden_layers"]
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    family = architecture.removesuffix("ForCausalLM")
    kind = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    written = kind(**MINIMAL).to_dict() | {"architectures": [architecture]}
    assert len(written) > 2 * len(MINIMAL)
    assert registry.parse({"architectures": [architecture]} | MINIMAL, ()) == registry.parse(written, ())


@pytest.mark.parametrize("variant", VARIANTS)
def test_old_and_new_rope_keys_mean_the_same(variant: str) -> None:
    architecture = f"{VARIANTS[variant][0]}ForCausalLM"
    new = families.config(*VARIANTS[variant]).to_dict() | {"architectures": [architecture]}
    old = dict(new)
    ropes = old.pop("rope_parameters")
    if "full_attention" in ropes:
        old["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    ropes = dict(ropes)
    old["rope_theta"] = ropes.pop("rope_theta")
    old["partial_rotary_factor"] = ropes.pop("partial_rotary_factor", None)
    ropes["type"] = ropes.pop("rope_type")
    old["rope_scaling"] = ropes
    assert registry.parse(old, ()) == registry.parse(new, ())


@pytest.mark.parametrize("architecture", registry.FAMILIES)
@pytest.mark.parametrize("key", ["attn_scale", "num_mtp_layers", "logits_scaling", "quantization_config"])
def test_an_unknown_setting_is_refused_by_name(architecture: str, key: str) -> None:
    document = {"architectures": [architecture]} | MINIMAL
    reference = registry.parse(document, ())
    assert registry.parse(document | {key: None, "_note": 1, "dtype": "bfloat16"}, ()) == replace(
        reference, dtype="bfloat16"
    )
    with pytest.raises(ConfigError, match=key):
        registry.parse(document | {key: {"bits": 4}}, ())
