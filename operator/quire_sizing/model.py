"""ModelShape: the dimensions that memory depends on, read from a checkpoint's config.json.

Counts the parameters of the families that the server runs, of the whole model and of one of several ranks
that share its layers. Knows no accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_sizing.errors import SizingError
from quire_sizing.weight_format import is_dequantized

_BIASED = {"qwen2"}  # families whose QKV biases are not in config.json
_HEAD_NORMS = {"qwen3", "qwen3_moe", "gemma3_text"}
_FOUR_NORMS = {"gemma2", "gemma3_text"}  # before and after attention and MLP
_TIED = {"gemma", "gemma2", "gemma3_text"}  # transformers' default where config.json has none
_FUSED = {"phi3"}  # queries, keys and values are one matrix, and gate and up another one
_ENCODERS = {"bert", "roberta", "xlm-roberta"}
_VOCAB_PADDED_TO = 16  # of each rank, for the server's CPU kernels
_MOST = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """``parameters``: the number of weights; ``longest``: the positions that the model was trained for. The
    fields with a default tell how ranks share the layers; without ``num_heads`` that is not known.
    """

    parameters: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    longest: int
    num_heads: int = 0
    intermediate_size: int = 0  # of the layers that are not sparse; 0: there are none
    num_experts: int = 0
    kv_parameters: int = 0  # of the projections to keys and values
    vocab_parameters: int = 0  # of the embedding and the head
    whole_parameters: int = 0  # that are not divided: norms, routers, biases after a sum
    adapted_size: int = 0  # inputs and outputs of the matrices that LoRA adapters may have, added up
    adapted_whole: int = 0  # those of them that are not divided among ranks
    dequantized: int = 0  # 1: a GPU holds the weights in 16 bits, having no kernel for their format


def tensor_sizes(model: ModelShape) -> tuple[int, ...]:
    """The numbers of ranks that can share the layers: they divide the heads, the heads of keys and values (or
    those divide them), the feed-forward and the experts. Weights stored in groups may allow fewer.
    """
    dimensions = [size for size in (model.intermediate_size, model.num_experts) if size]
    kv_heads = model.num_kv_heads
    return tuple(
        size
        for size in range(1, model.num_heads + 1)
        if not model.num_heads % size
        and (not kv_heads % size or not size % kv_heads)
        and not any(dimension % size for dimension in dimensions)
    ) or (1,)


def check_tensor(model: ModelShape, tensor: int) -> None:
    """Raises SizingError if so many ranks cannot share the layers."""
    working = tensor_sizes(model)
    if tensor not in working:
        raise SizingError(
            f"The model cannot be divided among {tensor} ranks; give one of {', '.join(map(str, working))}."
        )


def rank_parameters(model: ModelShape, tensor: int) -> int:
    """The weights of rank 0 of so many, which has the most: its part, the heads of keys and values that it
    shares with others, its rows of the padded vocabulary, and what is not divided.
    """
    if tensor == 1:
        return model.parameters
    split = model.parameters - model.kv_parameters - model.vocab_parameters - model.whole_parameters
    return (
        split // tensor
        + model.kv_parameters // min(tensor, model.num_kv_heads)
        + model.vocab_parameters // model.vocab_size * rank_vocab(model, tensor)
        + model.whole_parameters
    )


def rank_vocab(model: ModelShape, tensor: int) -> int:
    """The rows of the embedding, and of the head, that one of so many ranks has."""
    if tensor == 1:
        return model.vocab_size
    return -(-model.vocab_size // (tensor * _VOCAB_PADDED_TO)) * _VOCAB_PADDED_TO


def rank_kv_heads(model: ModelShape, tensor: int) -> int:
    """The heads of keys and values that one of so many ranks has in its cache."""
    return max(1, model.num_kv_heads // tensor)


def rank_adapted(model: ModelShape, tensor: int) -> int:
    """Of ``adapted_size``, what one of so many ranks has: of q, k, v, gate and up its outputs, of o and down
    its inputs. Heads of keys and values may be on several ranks.
    """
    if tensor == 1:
        return model.adapted_size
    kv_sizes = 2 * model.num_layers * model.num_kv_heads * model.head_size
    split = model.adapted_size - model.adapted_whole - kv_sizes
    return model.adapted_whole + split // tensor + kv_sizes // min(tensor, model.num_kv_heads)


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The model of a config.json. Raises SizingError, which names the key that is missing or not a number."""
    hidden, layers = _whole(config, "hidden_size"), _whole(config, "num_hidden_layers")
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head_size = _whole(config, "head_dim", hidden // heads)
    vocab = _whole(config, "vocab_size")
    family = str(config.get("model_type", ""))
    if family in _ENCODERS:
        return _encoder(config, hidden, layers, heads, vocab)
    tied = bool(config.get("tie_word_embeddings", family in _TIED))
    has_bias = bool(config.get("attention_bias"))
    input_bias = int(has_bias or family in _BIASED)
    keys_values = 2 * kv_heads * head_size * (hidden + input_bias)
    queries = heads * head_size * (2 * hidden + input_bias)
    whole = (4 if family in _FOUR_NORMS else 2) * hidden  # of one layer, but for its feed-forward
    whole += (hidden if has_bias else 0) + (2 * head_size if family in _HEAD_NORMS else 0)
    feed_forward = _feed_forward(config, hidden, layers)
    vocab_parameters = vocab * hidden * (1 if tied else 2)
    return ModelShape(
        parameters=layers * (queries + keys_values + whole)
        + feed_forward.parameters
        + vocab_parameters
        + hidden,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_size=head_size,
        hidden_size=hidden,
        vocab_size=vocab,
        longest=_whole(config, "max_position_embeddings"),
        num_heads=heads,
        intermediate_size=feed_forward.intermediate_size,
        num_experts=feed_forward.num_experts,
        kv_parameters=layers * keys_values,
        vocab_parameters=vocab_parameters,
        whole_parameters=layers * whole + feed_forward.whole + hidden,
        adapted_size=_adapted_size(
            config, layers, feed_forward.num_dense, heads * head_size, 2 * kv_heads * head_size
        ),
        adapted_whole=_adapted_size(config, layers, feed_forward.num_dense, 0, 0, width=0),
        dequantized=int(is_dequantized(config)),
    )


def _adapted_size(
    config: Mapping[str, Any],
    layers: int,
    num_dense: int,
    queries: int,
    keys_values: int,
    *,
    width: int | None = None,
) -> int:
    """What a LoRA adapter of rank 1 for every matrix has numbers for. Experts have none."""
    hidden = _whole(config, "hidden_size")
    if width is None:
        width = _whole(config, "intermediate_size")
    is_fused = config.get("model_type") in _FUSED
    attention = (1 if is_fused else 3) * hidden + queries + keys_values + queries + hidden
    feed_forward = (1 if is_fused else 2) * hidden + 2 * width + width + hidden
    return layers * attention + num_dense * feed_forward


def _encoder(config: Mapping[str, Any], hidden: int, layers: int, heads: int, vocab: int) -> ModelShape:
    """Every matrix and norm has a bias; positions and types of tokens have embeddings of their own. The head
    of a cross-encoder, a matrix of the hidden size, is not counted.
    """
    inner, positions = _whole(config, "intermediate_size"), _whole(config, "max_position_embeddings")
    matrices = 4 * hidden * (hidden + 1) + hidden * (inner + 1) + inner * (hidden + 1)
    embeddings = (vocab + positions + _whole(config, "type_vocab_size", 2)) * hidden
    return ModelShape(
        parameters=layers * (matrices + 4 * hidden) + embeddings + 2 * hidden,
        num_layers=layers,
        num_kv_heads=heads,
        head_size=hidden // heads,
        hidden_size=hidden,
        vocab_size=vocab,
        longest=positions,
        num_heads=heads,
        intermediate_size=inner,
        vocab_parameters=vocab * hidden,
    )


@dataclass(frozen=True)
class _FeedForward:
    """Of all layers. ``whole``: those of ``parameters`` that every rank has."""

    parameters: int
    whole: int
    intermediate_size: int
    num_experts: int
    num_dense: int  # layers that are not sparse


def _feed_forward(config: Mapping[str, Any], hidden: int, layers: int) -> _FeedForward:
    """Sparse layers with all their experts."""
    width = _whole(config, "intermediate_size")
    dense, bias = 3 * hidden * width, 0
    if config.get("mlp_bias"):
        dense, bias = dense + 2 * width + hidden, hidden
    key = next((key for key in ("num_local_experts", "num_experts") if config.get(key)), "")
    if not key:
        return _FeedForward(layers * dense, layers * bias, width, 0, layers)
    experts = _whole(config, key)
    inner = _whole(config, "moe_intermediate_size", width)
    router = hidden * experts
    sparse = experts * 3 * hidden * inner + router
    every, skipped = _whole(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    num_sparse = sum((layer + 1) % every == 0 and layer not in skipped for layer in range(layers))
    num_dense = layers - num_sparse
    return _FeedForward(
        num_sparse * sparse + num_dense * dense,
        num_sparse * router + num_dense * bias,
        width if num_dense else 0,
        experts,
        num_dense,
    )


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise SizingError(
            f"config.json: {key} is {value!r}; give the config.json of a text model, where it is above 0."
        )
    return value
