"""GGUF becomes a model directory that answers as the original does, or nothing at all."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire_server.core.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.models import gguf_config, import_gguf, rope, rope_config
from quire_server.models.fields import Fields
from quire_server.models.rope_config import Rope
from quire_server.text.tokenizer import Tokenizer
from tests.server.runner.in_process import InProcessEngine, greedy, load

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB = 4, 2, 64, 96, 300
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k, as its converter makes it."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def original(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def write(path: Path, model: LlamaForCausalLM, **metadata: Any) -> Path:
    """As llama.cpp's converter would; ``metadata`` overrides."""
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, metadata)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(gguf_name(name), tensor.detach().contiguous().numpy())
    if model.config.rope_parameters["rope_type"] == "llama3":
        theta = model.config.rope_parameters["rope_theta"]
        plain = rope.inverse_frequencies(Rope(HIDDEN // HEADS, theta))
        described = rope_config.parse_inner(Fields(LLAMA3), HIDDEN // HEADS, 8192, theta=theta)
        writer.add_tensor(gguf_config.ROPE_FACTORS, (plain / rope.inverse_frequencies(described)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = ["<end>", "<user>", *alphabet, "he", "12"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    types = [3, 4] + [1] * (VOCAB - 2)
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(metadata.get("merges", ["h e", "1 2"]))
    writer.add_eos_token_id(metadata.get("eos", 0))
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")


def gguf_name(name: str) -> str:
    back = {value: key for key, value in import_gguf._TOP_NAMES.items()}
    if name in back:
        return back[name]
    _, _, layer, *middle, kind = name.split(".")
    parts = {value: key for key, value in import_gguf._BLOCK_NAMES.items()}
    return f"blk.{layer}.{parts['.'.join(middle)]}.{kind}"


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied with biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_imported_model_answers_as_the_original(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = original(**changes)
    out = tmp_path / "out"
    import_gguf.run(write(tmp_path / "model.gguf", model), out)
    prompt = [5, 17, 200, 33, 8]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    engine = InProcessEngine(load(out))
    engine.generate([prompt], greedy(1, logprobs=VOCAB))
    ours = torch.tensor([value for _, value in sorted(engine.logprobs["0"][0].top)])
    torch.testing.assert_close(ours, torch.log_softmax(logits, dim=-1), atol=1e-4, rtol=1e-4)
    assert set(json.loads((out / "quire-manifest.json").read_text())["files"]) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_the_imported_tokenizer_splits_digits_and_knows_its_special_tokens(tmp_path: Path) -> None:
    import_gguf.run(write(tmp_path / "model.gguf", original()), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    ids = tokenizer.encode("he 12<end><user>é\n")
    text = [tokenizer.token_bytes(token_id) for token_id in ids]
    assert text == [b"he", b" ", b"1", b"2", b"<end>", b"<user>", b"\xc3", b"\xa9", b"\n"]
    assert tokenizer.decode(ids) == "he 12<user>é\n"
    assert tokenizer.eos_token_ids == (0,)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"]) == ("<end>", "<user>")
    assert config["chat_template"] == "{{ messages[0].content }}"


def test_smollm2_keeps_the_digits_of_its_original_apart(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    text = "In 2024, 3.14159!"
    pieces = [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " ", "3", ".", "1", "4", "1", "5", "9", "!"]


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another architecture": ({"architecture": "mamba"}, ConfigError, "mamba.*supported"),
    "another tokenizer": ({"tokenizer": "llama"}, ConfigError, "byte-level BPE"),
    "another pre-tokenizer": ({"pre": "poro"}, ConfigError, "poro"),
    "merges of unknown tokens": ({"merges": ["nope never"]}, ModelCorruptError, "merges"),
    "an eos outside the vocabulary": ({"eos": 9999}, ModelCorruptError, "9999"),
}


@pytest.mark.parametrize(("metadata", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_imported_leaves_nothing_behind(
    tmp_path: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "model.gguf", original(), **metadata)
    with pytest.raises(error, match=message):
        import_gguf.run(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 0.9, 0.999])
def test_a_truncated_file_is_corrupt(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "model.gguf", original())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelCorruptError, match="Download"):
        import_gguf.run(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_random_damage_to_the_header_raises_nothing_but_our_own_errors(tmp_path: Path) -> None:
    good = write(tmp_path / "model.gguf", original()).read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    for round_ in range(60):
        data = bytearray(good)
        for position in rng.integers(0, 6000, 4):
            data[position] = rng.integers(0, 256)
        damaged.write_bytes(data)
        try:
            import_gguf.run(damaged, tmp_path / f"out{round_}")
        except (ModelCorruptError, ConfigError):
            assert not (tmp_path / f"out{round_}").exists()


def test_an_existing_directory_is_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", original())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        import_gguf.run(path, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "precious"
    with pytest.raises(ModelNotFoundError):
        import_gguf.run(tmp_path / "missing.gguf", tmp_path / "other")
