"""Models that turn a text into a vector: a bidirectional encoder, or a decoder whose states are pooled.

Both compute whole texts that are packed one after the other. A decoder needs keys and values of one layer at
a time only, so all its layers write to one scratch cache, which no later step reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_server.core.request import PoolingParams
from quire_server.errors import ConfigError
from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.layers.linear import LinearFactory
from quire_server.layers.ops import decode_gather, kv_cache_rows, prefill_spans
from quire_server.layers.quantized.linear import Quantization
from quire_server.model_dir.files import ModelFiles
from quire_server.models import encoder_config, pooling_config, registry, weights
from quire_server.models.decoder import Decoder
from quire_server.models.encoder import Encoder
from quire_server.models.encoder_config import ENCODERS
from quire_server.models.pooling_config import PoolingConfig
from quire_server.runner import kv_cache, loader, quantization
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu.device import Device

OnProgress = Callable[[int, int], None]
_HEAD = "lm_head.weight"  # which a decoder's checkpoint may have, and no vector needs


@dataclass(frozen=True, slots=True)
class Text:
    """One input: its tokens, and what is asked for."""

    token_ids: tuple[int, ...]
    asked: PoolingParams


class PoolingModel(Protocol):
    """[B, size] f32 of B texts: their pooled states, or a score each."""

    def __call__(self, texts: Sequence[Text]) -> Tensor: ...

    def damage_weight(self) -> None:
        """Make one weight NaN: the fault nan_weight."""


@dataclass(frozen=True, slots=True)
class LoadedPoolingModel:
    """``scores_pairs``: a cross-encoder, whose vector is one number."""

    model: PoolingModel
    pooling: PoolingConfig
    scores_pairs: bool
    size: int
    vocab_size: int
    stored_dtype: str
    longest: int  # text that the model takes, in tokens
    max_model_len: int
    dtype: str
    quantization: str


def load(
    model_dir: Path, options: RunnerConfig, pooling: str, on_progress: OnProgress, device: Device | None
) -> LoadedPoolingModel:
    """Open, check and read the model; ``pooling``: of ``--pooling``. Raises errors of
    `quire_server.errors`.
    """
    files = ModelFiles.open(model_dir)
    named = files.read_json("config.json").get("architectures")
    is_encoder = isinstance(named, list) and len(named) == 1 and named[0] in ENCODERS
    read = _read_encoder if is_encoder else _read_decoder
    return read(files, options, pooling, on_progress, device)


def _max_model_len(options: RunnerConfig, longest: int) -> int:
    if options.max_model_len is not None and options.max_model_len > longest:
        raise ConfigError(
            f"max-model-len {options.max_model_len} is more than the {longest} tokens of the model's longest "
            "text. Lower it."
        )
    return options.max_model_len or longest


def _arithmetic(
    options: RunnerConfig, stored: str, checkpoint: Quantization | None, device: Device | None
) -> tuple[str, str, LinearFactory]:
    """(dtype, quantization, factory). Vectors are kept and compared for years: auto rounds no weights."""
    wanted = "none" if options.quantization == "auto" else options.quantization
    name, linear = quantization.choose(
        wanted,
        checkpoint=checkpoint,
        dtype_is_auto=False,
        stored=stored,
        capability=None if device is None else device.capability,
    )
    return loader.dtype_name(options.dtype, stored, linear, for_gpu=device is not None), name, linear


def _place(device: Device | None) -> torch.device:
    return torch.device("cpu") if device is None else device.place


def _read_encoder(
    files: ModelFiles, options: RunnerConfig, pooling: str, on_progress: OnProgress, device: Device | None
) -> LoadedPoolingModel:
    config = encoder_config.parse(files.read_json("config.json"))
    found = pooling_config.read(files, default="cls", override="cls" if config.head else pooling)
    longest = min(config.max_position, found.max_length or config.max_position)
    dtype, name, linear = _arithmetic(options, config.dtype, None, device)
    made = partial(Encoder, config, dtype=loader.DTYPES[dtype], linear=linear)
    skeleton = made(device=torch.device("meta"))
    shards = weights.inspect(files, skeleton.targets(), skeleton.ignored)
    encoder = made(device=_place(device))
    weights.read(files, shards, encoder.targets(), on_progress)
    encoder.finish()
    return LoadedPoolingModel(
        PooledEncoder(encoder, found.pooling, _place(device)),
        found,
        bool(config.head),
        1 if config.head else config.hidden_size,
        config.vocab_size,
        config.dtype,
        longest,
        _max_model_len(options, longest),
        dtype,
        name,
    )


def _read_decoder(
    files: ModelFiles, options: RunnerConfig, pooling: str, on_progress: OnProgress, device: Device | None
) -> LoadedPoolingModel:
    """The head is not needed, so it is the embedding. A checkpoint that was saved without one has the names
    of its tensors without `model.`.
    """
    # A decoder of `sentence-transformers` is saved without its head, and named so.
    config = replace(registry.load(files, without_head=True), tie_word_embeddings=True)
    found = pooling_config.read(files, default="last", override=pooling)
    longest = min(config.max_position, found.max_length or config.max_position)
    dtype, name, linear = _arithmetic(options, config.dtype, config.quantization, device)
    max_model_len = _max_model_len(options, longest)
    made = partial(registry.build, config, dtype=loader.DTYPES[dtype], linear=linear)
    prefix = "" if weights.has_tensor(files, "model.embed_tokens.weight") else "model."
    skeleton = made(max_len=1, device=torch.device("meta"))
    wanted = {key.removeprefix(prefix): tensor for key, tensor in skeleton.targets().items()}
    shards = weights.inspect(files, wanted, (_HEAD,))
    decoder = made(max_len=max_model_len, device=_place(device))
    targets = {key.removeprefix(prefix): tensor for key, tensor in decoder.targets().items()}
    weights.read(files, shards, targets, on_progress)
    decoder.finish()
    return LoadedPoolingModel(
        PooledDecoder(decoder, found.pooling, options, max_model_len, _place(device)),
        found,
        False,
        config.hidden_size,
        config.vocab_size,
        config.dtype,
        longest,
        max_model_len,
        dtype,
        name,
    )


def _packed(texts: Sequence[Text], place: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """(token ids, positions, lengths) of texts one after the other."""
    lengths = [len(text.token_ids) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text.token_ids])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return tokens.to(place), positions.to(place), lengths


def _pooled(states: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """[B, hidden] f32 of the states [T, hidden] of B texts."""
    if pooling == "mean":
        return torch.stack([part.float().mean(0) for part in states.split(list(lengths))])
    ends = torch.tensor(lengths).cumsum(0)
    rows = ends - 1 if pooling == "last" else ends - torch.tensor(lengths)
    return states[rows.to(states.device)].float()


class PooledEncoder:
    """An encoder with its pooling, or with the head of a cross-encoder."""

    def __init__(self, encoder: Encoder, pooling: str, place: torch.device) -> None:
        self._encoder, self._pooling, self._place = encoder, pooling, place

    def __call__(self, texts: Sequence[Text]) -> Tensor:
        """As of PoolingModel."""
        tokens, positions, lengths = _packed(texts, self._place)
        types = torch.cat([_token_types(text, self._encoder.config.type_vocab_size) for text in texts])
        states = self._encoder.states(tokens, positions, types.to(self._place), lengths)
        if not self._encoder.config.head:
            return _pooled(states, lengths, self._pooling)
        ends = torch.tensor(lengths).cumsum(0)
        first = states[(ends - torch.tensor(lengths)).to(self._place)]
        return self._encoder.scores(first)

    def damage_weight(self) -> None:
        """As of PoolingModel."""
        self._encoder.norm.weight[0] = float("nan")


def _token_types(text: Text, num_types: int) -> Tensor:
    """1 from the second text of a pair on, where the model knows such a type."""
    types = torch.zeros(len(text.token_ids), dtype=torch.int64)
    if text.asked.second_text_at and num_types > 1:
        types[text.asked.second_text_at :] = 1
    return types


class PooledDecoder:
    """A causal decoder with its pooling."""

    def __init__(
        self, decoder: Decoder, pooling: str, options: RunnerConfig, longest: int, place: torch.device
    ) -> None:
        config = decoder.config
        self._decoder, self._pooling, self._place = decoder, pooling, place
        self._block_size = options.block_size
        most = max(options.max_num_batched_tokens, longest)
        num_blocks = most // options.block_size + options.max_num_seqs + 1  # a partial one for each text
        one_layer = replace(config, layers=config.layers[:1])
        dtype = decoder.embedding.dtype
        scratch = kv_cache.allocate(one_layer, num_blocks, options.block_size, dtype=dtype, device=place)
        self._caches = scratch * config.num_layers

    def __call__(self, texts: Sequence[Text]) -> Tensor:
        """As of PoolingModel."""
        decoder, lengths = self._decoder, [len(text.token_ids) for text in texts]
        hidden, residual = decoder.states(self._batch(texts), self._caches)
        if self._pooling != "mean":
            ends = torch.tensor(lengths).cumsum(0)
            rows = (ends - 1 if self._pooling == "last" else ends - torch.tensor(lengths)).to(self._place)
            return decoder.norm(hidden[rows], residual[rows]).float()
        return _pooled(decoder.norm(hidden, residual), lengths, "mean")

    def damage_weight(self) -> None:
        """As of PoolingModel."""
        self._decoder.norm.weight[0] = float("nan")

    def _batch(self, texts: Sequence[Text]) -> ForwardBatch:
        """The texts as whole prompts, whose blocks lie one after the other in the scratch cache."""
        config, size = self._decoder.config, self._block_size
        tokens, positions, lengths = _packed(texts, self._place)
        counts = [-(-length // size) for length in lengths]
        first_blocks = [0, *accumulate(counts)][:-1]
        table = torch.zeros(len(texts), max(counts), dtype=torch.int64)
        for row, (first, count) in enumerate(zip(first_blocks, counts, strict=True)):
            table[row, :count] = torch.arange(first, first + count)
        firsts = torch.tensor(first_blocks).repeat_interleave(torch.tensor(lengths)).to(self._place)
        slots = firsts * size + positions
        none = torch.empty(0, dtype=torch.int64, device=self._place)
        prefill = (
            table.to(self._place),
            torch.tensor(lengths).to(self._place),
            torch.tensor([0, *accumulate(lengths)]).to(self._place),
        )
        shape = (config.num_kv_heads, size)
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            sample_rows=none,
            num_decodes=0,
            num_queries=1,
            decode_table=none.view(0, 0),
            decode_lens=none,
            prefill_table=prefill[0],
            prefill_lens=prefill[1],
            prefill_bounds=prefill[2],
            prefill_chunks=tuple((length, length) for length in lengths),
            cache_rows=cache(partial(kv_cache_rows, slots, *shape)),
            plans={
                window: AttentionPlan(
                    cache(partial(decode_gather, none.view(0, 0), none, *shape, window=window)),
                    cache(partial(prefill_spans, *prefill, *shape, window=window)),
                )
                for window in config.windows
            },
        )
