"""Random embedders and cross-encoders as transformers writes them, and their vectors by transformers."""

import json

import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
)

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
CONFIGS = {
    "bert": (BertConfig, {"num_labels": 1}),
    "xlm-roberta": (XLMRobertaConfig, {"num_labels": 1, "pad_token_id": 1, "type_vocab_size": 1}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}),
}


def write(directory, kind, *, pooling=None, normalize=True, cross_encoder=False, seed=0):
    """Write a model with a tokenizer of letters. ``pooling``: as in 1_Pooling/config.json; None: no such
    file. Returns the directory.
    """
    config_class, more = CONFIGS[kind]
    torch.manual_seed(seed)
    auto = AutoModelForSequenceClassification if cross_encoder else AutoModel
    model = auto.from_config(config_class(**SIZES | more), dtype=torch.float32)
    model.save_pretrained(directory)
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    if pooling is not None:
        modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        documents = [
            {"idx": i, "name": str(i), "path": "", "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(modules)
        ]
        (directory / "modules.json").write_text(json.dumps(documents))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return directory


def write_with_head(directory):
    """A causal Qwen3 as it is served for generation, its head included."""
    torch.manual_seed(0)
    more = CONFIGS["qwen3"][1] | {"tie_word_embeddings": False}
    Qwen3ForCausalLM(Qwen3Config(**SIZES | more)).float().save_pretrained(directory)
    _tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _tokenizer():
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(word) for word in WORDS[:4]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


@torch.inference_mode()
def states(directory, token_ids):
    """[T, hidden] of one text, by transformers."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]


@torch.inference_mode()
def score(directory, token_ids, token_types):
    """A cross-encoder's raw score of one pair, by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    types = {"token_type_ids": torch.tensor([token_types])} if model.config.type_vocab_size > 1 else {}
    return model(input_ids=torch.tensor([token_ids]), **types).logits[0, 0]


def tensor_names(directory):
    """The names of the tensors of a checkpoint."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        return list(file.keys())
