"""Quantised checkpoints written by other tools give the answers of transformers with the weights that those
tools read from them.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.models import families
from tests.server.runner.in_process import InProcessEngine, greedy, load

ROOT = Path(__file__).parents[3]
LENGTH = 12
_rng = random.Random(5)
PROMPTS = [[_rng.randrange(2, 211) for _ in range(length)] for length in (1, 17, 40)]


def tiny_llama(directory: Path, **settings: object) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "vocab_size": 211,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.25,  # wide, so that the likeliest token is well above the second
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            **settings,
        }
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


def assert_same_answers(directory: Path, model: LlamaForCausalLM, **options: object) -> None:
    """Tokens, and all log-probabilities of the first one."""
    engine = InProcessEngine(load(directory, **options), max_num_batched_tokens=24)
    assert engine.generate(PROMPTS, greedy(LENGTH)) == families.answers(model, PROMPTS, LENGTH)
    engine.generate(PROMPTS[1:2], greedy(1, logprobs=211))
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([PROMPTS[1]])).logits[0, -1], dim=-1)
    (entry,) = engine.logprobs["0"]
    ours = torch.tensor([value for _, value in sorted(entry.top)])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain") / "float")


@pytest.fixture(scope="module")
def auto_rounded(plain: Path) -> Path:
    program = [sys.executable, "-m", "tests.server.models.auto_round_oracle", str(plain.parent)]
    done = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    return plain.parent


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gptq", "act_order", "awq"])
def test_four_bit_checkpoints_of_auto_round(name: str, auto_rounded: Path) -> None:
    document = json.loads((auto_rounded / name / "config.json").read_text())["quantization_config"]
    assert not document["sym"]
    assert document.get("desc_act", False) == (name == "act_order")
    weights = load_file(auto_rounded / f"{name}.dequantised.safetensors")
    assert len(weights) == 7
    model = LlamaForCausalLM.from_pretrained(auto_rounded / "float").eval()
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    assert not torch.equal(before, model.model.layers[0].mlp.down_proj.weight)
    assert_same_answers(auto_rounded / name, model)


@pytest.mark.parametrize("scheme", compressed.SCHEMES)
def test_checkpoints_of_compressed_tensors(scheme: str, plain: Path, tmp_path: Path) -> None:
    compressed.write(plain, tmp_path / "model", scheme)
    assert_same_answers(tmp_path / "model", compressed.reference(tmp_path / "model"))


@pytest.mark.parametrize("blocks", [[64, 128], None], ids=["by block", "by tensor"])
def test_fp8_checkpoints_of_transformers(blocks: list[int] | None, plain: Path, tmp_path: Path) -> None:
    compressed.write_transformers_fp8(plain, tmp_path / "model", blocks)
    assert_same_answers(tmp_path / "model", compressed.reference(tmp_path / "model"))


def test_checkpoints_of_autofp8_hold_the_same_tensors(plain: Path, tmp_path: Path) -> None:
    compressed.write(plain, tmp_path / "model", "fp8 by tensor, static")
    model = compressed.reference(tmp_path / "model")
    document = json.loads((tmp_path / "model/config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
    }
    (tmp_path / "model/config.json").write_text(json.dumps(document))
    assert_same_answers(tmp_path / "model", model)


def test_ignored_layers_and_biases_are_unchanged(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "float", attention_bias=True, mlp_bias=True, num_hidden_layers=2)
    ignore = ["lm_head", "model.layers.0.self_attn.k_proj", "re:.*layers.1.mlp.*"]
    compressed.write(source, tmp_path / "model", "int8 w8a8", ignore=ignore)
    stored = load_file(tmp_path / "model/model.safetensors")
    dtypes = {
        name: stored[f"model.layers.{name}.weight"].dtype for name in ("0.self_attn.k_proj", "1.mlp.up_proj")
    }
    assert set(dtypes.values()) == {torch.float32}
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert_same_answers(tmp_path / "model", compressed.reference(tmp_path / "model"))
