"""An imported GGUF model gives the answers of the original; a failed import leaves nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.models import gguf_config, import_gguf
from quire_server.text.tokenizer import Tokenizer
from tests.server.models import families, gguf_files
from tests.server.models.gguf_files import VOCAB
from tests.server.runner.in_process import InProcessEngine, greedy, load

SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.4, 1.5, 1.7, 2.0],
    "long_factor": [2.0] * 6,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama with experts": ("Mixtral", {"num_local_experts": 4}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPES}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONG}),
}


def factors(prefix: str, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp's converter computes from rope scalings, computed by transformers."""
    config = families.config(prefix, SIZES | settings)
    kind = config.rope_parameters.get("rope_type")
    if kind == "llama3":
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        return {"rope_freqs.weight": (plain / scaled).numpy()}
    if kind == "longrope":
        return {f"rope_factors_{k}.weight": np.float32(LONG[f"{k}_factor"]) for k in ("long", "short")}
    return {}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    families.build(path, "Llama", SIZES)
    return path


def imported(tmp_path: Path, variant: str) -> tuple[transformers.PreTrainedModel, Path]:
    prefix, settings = VARIANTS[variant]
    model = families.build(tmp_path / "original", prefix, SIZES | settings)
    extra = factors(prefix, settings)
    gguf_files.write(tmp_path / "model.gguf", tmp_path / "original", extra=extra)
    import_gguf.run(tmp_path / "model.gguf", tmp_path / "out")
    return model, tmp_path / "out"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_imported_model_answers_as_the_original(tmp_path: Path, variant: str) -> None:
    model, out = imported(tmp_path, variant)
    prompt = [5, 17, 200, 33, 8, 91, 12, 64, 150, 7]
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


def test_every_architecture_of_the_table_is_among_them() -> None:
    assert {variant.split(",")[0] for variant in VARIANTS} == set(gguf_config.FAMILIES)


# transformers' loader does not support experts with the architecture "llama".
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "llama with experts"])
def test_the_weights_are_those_that_transformers_reads_from_the_same_file(
    tmp_path: Path, variant: str
) -> None:
    _, out = imported(tmp_path, variant)
    kind = getattr(transformers, f"{VARIANTS[variant][0]}ForCausalLM")
    # Our configuration, because its own from the metadata lacks head sizes.
    config = kind.config_class.from_pretrained(out, pad_token_id=0)
    read = kind.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32)
    loaded = kind.from_pretrained(out, config=config, dtype=torch.float32)
    ours, theirs = loaded.state_dict(), read.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0, msg=name)


def test_the_imported_tokenizer_splits_digits_and_knows_its_special_tokens(
    original: Path, tmp_path: Path
) -> None:
    import_gguf.run(gguf_files.write(tmp_path / "model.gguf", original), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    ids = tokenizer.encode("he 12<end><user>é\n")
    text = [tokenizer.token_bytes(token_id) for token_id in ids]
    assert text == [b"he", b" ", b"1", b"2", b"<end>", b"<user>", b"\xc3", b"\xa9", b"\n"]
    assert tokenizer.decode(ids) == "he 12<user>é\n"
    assert tokenizer.eos_token_ids == (0,)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"]) == ("<end>", "<user>")
    assert config["chat_template"] == "{{ messages[0].content }}"


TEXTS = [
    "the cat",
    "There is a cat in there, eating.  Two   spaces!",
    "ä ß é 漢\n\tx",
    "1 2 12",
    "",
    "a</s>",
]


@pytest.mark.parametrize("variant", ["llama, tied", "gemma2", "phi3"])
def test_sentencepiece_vocabularies_cut_text_as_transformers_does(tmp_path: Path, variant: str) -> None:
    prefix, settings = VARIANTS[variant]
    families.build(tmp_path / "original", prefix, SIZES | settings | {"vocab_size": 310})
    gguf_files.write(tmp_path / "model.gguf", tmp_path / "original", tokenizer="llama")
    import_gguf.run(tmp_path / "model.gguf", tmp_path / "out")
    ours = Tokenizer.load(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text)) == text.replace("</s>", ""), text


def test_smollm2_keeps_the_digits_of_its_original_apart(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    text = "In 2024, 3.14159!"
    pieces = [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " ", "3", ".", "1", "4", "1", "5", "9", "!"]


ALL = "gemma2, gemma3, llama, llama with experts, phi3, qwen2, qwen3, qwen3moe"
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another architecture": ({"architecture": "mamba"}, ConfigError, f"'mamba'.*supported: {ALL}"),
    "an unknown setting": (
        {"own": {"residual_scale": 0.5}},
        ConfigError,
        r"llama\.residual_scale is not supported",
    ),
    "an unknown tensor": (
        {"extra": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        ConfigError,
        "'blk.0.attn_sinks.weight' belongs to no llama model",
    ),
    "a tensor of a type that cannot be converted": (
        {"instead": {"output_norm.weight": np.zeros(64, np.int8)}},
        ConfigError,
        "output_norm.weight: .*another quantisation",
    ),
    "another tokenizer": ({"tokenizer": "rwkv"}, ConfigError, "'rwkv'.*supported: gpt2, llama"),
    "another pre-tokenizer": ({"pre": "poro"}, ConfigError, "poro"),
    "merges of unknown tokens": ({"merges": ["nope never"]}, ModelCorruptError, "merges"),
    "an eos outside the vocabulary": ({"eos": 9999}, ModelCorruptError, "9999"),
}


@pytest.mark.parametrize(("metadata", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_failed_import_leaves_nothing_behind(
    original: Path, tmp_path: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", original, **metadata)
    with pytest.raises(error, match=message):
        import_gguf.run(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_a_tokenizer_that_makes_its_library_panic_is_corrupt(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it."""

    def panic(metadata: Any) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(import_gguf.gguf_tokenizer, "build", panic)
    path = gguf_files.write(tmp_path / "model.gguf", original)
    with pytest.raises(ModelCorruptError, match="tokenizer of the GGUF file cannot be used: called"):
        import_gguf.run(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 0.9, 0.999])
def test_a_truncated_file_is_corrupt(original: Path, tmp_path: Path, share: float) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", original)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelCorruptError, match="Download"):
        import_gguf.run(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
def test_random_damage_to_the_header_raises_nothing_but_our_own_errors(
    tokenizer: str, tmp_path: Path
) -> None:
    families.build(tmp_path / "original", "Gemma2", SIZES | GEMMA | {"vocab_size": 310})
    path = gguf_files.write(tmp_path / "model.gguf", tmp_path / "original", tokenizer=tokenizer)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    for round_ in range(60):
        data = bytearray(good)
        for position in rng.integers(0, 8000, 4):
            data[position] = rng.integers(0, 256)
        damaged.write_bytes(data)
        try:
            import_gguf.run(damaged, tmp_path / f"out{round_}")
        except (ModelCorruptError, ConfigError):
            assert not (tmp_path / f"out{round_}").exists()


def test_an_existing_directory_is_not_touched(original: Path, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", original)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        import_gguf.run(path, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "precious"
    with pytest.raises(ModelNotFoundError):
        import_gguf.run(tmp_path / "missing.gguf", tmp_path / "other")
