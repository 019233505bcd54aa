"""Malicious headers and configurations: no code, no hang, no memory; each error names what is wrong."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_server.errors import ConfigError, ModelCorruptError
from tests.server.models import directories
from tests.server.runner.in_process import InProcessEngine, greedy, load

EMBEDDING = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def test_the_good_directory_loads_and_answers(tmp_path: Path) -> None:
    runner = load(directories.write(tmp_path))
    assert len(InProcessEngine(runner).generate([[3, 4, 5]], greedy(4))[0]) == 4


def _entry(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries[DOWN].update(changes)


def _renamed(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries.update({"x" * (2 << 20): {**entries.pop(DOWN), **changes}})


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a tensor is missing": (lambda e: e.pop(DOWN), "cut short"),
    "a tensor has another name": (lambda e: e.update({"evil": e.pop(DOWN)}), "evil.*config.json"),
    "two dimensions are swapped": (_entry(shape=[24, 16]), rf"model.safetensors.*{DOWN}.*\[16, 24\]"),
    "a huge shape": (_entry(shape=[1 << 40, 1 << 40]), f"{DOWN}.*takes"),
    "a huge shape that overflows": (_entry(shape=[1 << 47] * 8), f"{DOWN}.*takes"),
    "too many dimensions": (_entry(shape=[1] * 9), f"{DOWN}.*bad shape"),
    "a negative dimension": (_entry(shape=[-16, -24]), f"{DOWN}.*bad shape"),
    "a boolean dimension": (_entry(shape=[True, 384]), f"{DOWN}.*bad shape"),
    "a float dimension": (_entry(shape=[16.0, 24]), f"{DOWN}.*bad shape"),
    "offsets beyond the file": (_entry(data_offsets=[1 << 40, (1 << 40) + 1536]), f"{DOWN}.*follow"),
    "offsets that overlap": (_entry(data_offsets=[0, 1536]), "does not follow"),
    "offsets in reverse": (_entry(data_offsets=[1536, 0]), f"{DOWN}.*takes"),
    "offsets that are no list": (_entry(data_offsets="ab"), f"{DOWN}.*bad"),
    "an entry that is no object": (lambda e: e.update({DOWN: 7}), f"{DOWN}.*bad header"),
    "an unknown dtype": (_entry(dtype="F8_E5M2"), "F8_E5M2.*supported"),
    "integers for floats": (_entry(dtype="I32"), f"{DOWN}.*int32.*asks for a float type"),
    "a dtype of another type": (_entry(dtype=["F32"]), f"{DOWN}.*(supported|bad)"),
    "a name of megabytes, of a bad entry": (lambda e: e.update({"x" * (2 << 20): 7}), "^.{0,300}$"),
    "a name of megabytes, out of order": (_renamed(data_offsets=[4, 1540]), "^.{0,300}$"),
    "a name of megabytes, of another size": (_renamed(shape=[1]), "^.{0,300}$"),
    "a name of megabytes, of no tensor of the model": (_renamed(), "^.{0,400}$"),
}


@pytest.mark.parametrize(("change", "message"), HEADERS.values(), ids=HEADERS)
def test_a_bad_header_is_named_before_anything_is_allocated(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises((ModelCorruptError, ConfigError), match=message):
        load(directories.write(tmp_path, change=change))


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, -1000])
def test_a_truncated_file_is_corrupt(tmp_path: Path, size: int) -> None:
    path = directories.write(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(ModelCorruptError, match=r"model\.safetensors.*[Dd]ownload"):
        load(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x05" + b"\0" * 7 + b"{nope",
    ],
)
def test_what_is_no_safetensors_file_is_corrupt(tmp_path: Path, data: bytes) -> None:
    (directories.write(tmp_path) / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelCorruptError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_header_nested_without_end_is_corrupt(tmp_path: Path) -> None:
    nested = b"[" * 200_000
    data = len(nested).to_bytes(8, "little") + nested
    (directories.write(tmp_path) / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelCorruptError, match="JSON"):
        load(tmp_path)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gigantic vocabulary": ({"vocab_size": 1 << 22}, "embed_tokens.*shape"),
    "absurd vocabulary": ({"vocab_size": 1 << 60}, "vocab_size"),
    "gigantic hidden size": ({"hidden_size": 1 << 17, "head_dim": 4}, "shape"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "thousands of layers": ({"num_hidden_layers": 1000}, "tensors are in no file"),
    "negative heads": ({"num_attention_heads": -4}, "num_attention_heads"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "cannot share"),
    "text for a number": ({"hidden_size": "16"}, "hidden_size"),
    "true for a number": ({"hidden_size": True}, "hidden_size"),
    "infinite epsilon": ({"rms_norm_eps": 1e300}, "rms_norm_eps"),
    "text for a flag": ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    "missing size": ({"intermediate_size": None}, "intermediate_size"),
    "no architecture": ({"architectures": None}, "architectures"),
    "another architecture": ({"architectures": ["os.system"]}, "os.system.*supported: .*LlamaForCausalLM"),
    "another activation": ({"hidden_act": "gelu"}, "gelu.*supported"),
    "quantised in an unknown way": ({"quantization_config": {"quant_method": "x"}}, "quant_method 'x'"),
    "a window where there is none": ({"sliding_window": 128}, "sliding_window.*not know"),
    "a setting of another family": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping.*not know"),
    "an unknown setting": ({"frobnicate": True}, "frobnicate.*not know"),
    "a setting with a long name": ({"x" * 9999: "y" * 9999}, "^.{0,300}$"),
    "unknown rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic.*supported"),
    "unknown rope setting": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
        "mrope_section.*not know",
    ),
    "two ropes that disagree": (
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 3.0}},
        "rope_scaling.*not know",
    ),
    "rotary dimensions that cannot be paired": (
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
        "3 rotary dimensions",
    ),
    "part of a rotation where it is whole": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor.*not know",
    ),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "rope factor of nothing": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    "rope that is a list": ({"rope_scaling": [1]}, "rope_scaling"),
    "rope band of no width": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor",
    ),
    "unknown dtype": ({"torch_dtype": "float8"}, "float8"),
    "eos that is text": ({"eos_token_id": "2"}, "eos_token_id"),
    "eos without end": ({"eos_token_id": list(range(1000))}, "eos_token_id"),
}


@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_bad_config_names_its_key(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelCorruptError, ConfigError), match=message):
        load(directories.write(tmp_path, config=config))


def test_a_claim_of_terabytes_costs_no_memory(tmp_path: Path) -> None:
    directories.write(
        tmp_path,
        config={"hidden_size": 1 << 17, "head_dim": 4, "intermediate_size": 1 << 20, "vocab_size": 1 << 22},
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelCorruptError):
        load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
