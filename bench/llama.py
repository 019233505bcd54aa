"""llama.cpp by its low-level interface, with several sequences per call (used by ``bench.cpu``)."""

import ctypes
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf
from numpy.typing import NDArray

from bench.baselines import GREEDY, Drawing
from bench.engine import CHUNK, CONTEXT

SEED = 1


class LlamaCpp:
    """A ``baselines.Engine`` and ``arrivals.Slots``. Each sequence has its own KV buffer (not
    ``kv_unified``), which llama.h calls faster without a common prefix.
    """

    def __init__(self, gguf: Path, streams: int, threads: int, drawing: Drawing = GREEDY) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        model_options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = CONTEXT * streams, streams, False
        options.n_batch, options.n_ubatch = CHUNK, 512
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp cannot load {gguf}")
        self.streams = streams
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self._drawn = Drawn(self.context, llama_cpp.llama_model_get_vocab(self.model), drawing, streams)

    def close(self) -> None:
        """Free the memory."""
        self._drawn.close()
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def run(self, prompts: list[list[int]], answers: list[int]) -> tuple[float, list[tuple[int, float]]]:
        """As in ``baselines.Engine``; complete sequences leave the batch and the cache."""
        self.clear()
        start = time.perf_counter()
        tokens = {number: self.prefill(number, prompt) for number, prompt in enumerate(prompts)}
        prefill, steps, length = time.perf_counter() - start, [], len(prompts[0])
        for step in range(max(answers) - 1):
            for number in [n for n in tokens if answers[n] == step + 1]:
                self.release(number)
                del tokens[number]
            start = time.perf_counter()
            tokens = self.decode({number: (token, length + step) for number, token in tokens.items()})
            steps.append((len(tokens), time.perf_counter() - start))
        return prefill, steps

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        for slot in range(self.streams):
            self._drawn.begin(slot)

    def prefill(self, slot: int, prompt: list[int]) -> int:
        """The first token of a sequence."""
        for first in range(0, len(prompt), CHUNK):
            rows = [(token, first + i, slot) for i, token in enumerate(prompt[first : first + CHUNK])]
            self._decode(rows, [len(rows) - 1])
        return self._drawn.next(len(rows) - 1, slot)

    def decode(self, rows: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """The next token of each sequence, from its (last token, position)."""
        self._decode([(token, position, slot) for slot, (token, position) in rows.items()], range(len(rows)))
        return {slot: self._drawn.next(row, slot) for row, slot in enumerate(rows)}

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), slot, -1, -1)
        self._drawn.begin(slot)

    def _decode(self, rows: list[tuple[int, int, int]], wanted: Iterable[int]) -> None:
        batch, wanted = self.batch, set(wanted)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, i in wanted
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")


class Drawn:
    """Draws tokens from a context's logits, by llama.cpp's samplers where it is not the largest logit.

    By a grammar as llama.cpp's own programs do it: a token is drawn first, and only if the grammar refuses it
    are all others checked.
    """

    def __init__(self, context: object, vocab: object, drawing: Drawing, sequences: int) -> None:
        self._context, self._size = context, llama_cpp.llama_vocab_n_tokens(vocab)
        self._chain: object = None
        if drawing.temperature:
            self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            for sampler in (
                llama_cpp.llama_sampler_init_temp(drawing.temperature),
                llama_cpp.llama_sampler_init_top_p(drawing.top_p, 1),
                llama_cpp.llama_sampler_init_dist(SEED),
            ):
                llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        self._grammars = list[object]()
        if drawing.schema:
            if drawing.temperature:
                raise ValueError("llama.cpp's grammars are measured with greedy answers alone")
            text = json_schema_to_gbnf(drawing.schema).encode()
            self._grammars = [
                llama_cpp.llama_sampler_init_grammar(vocab, text, b"root") for _ in range(sequences)
            ]

    def close(self) -> None:
        """Free the memory."""
        for sampler in (*self._grammars, *([self._chain] if self._chain else [])):
            llama_cpp.llama_sampler_free(sampler)

    def begin(self, sequence: int) -> None:
        """Another answer in this sequence."""
        if self._grammars:
            llama_cpp.llama_sampler_reset(self._grammars[sequence])

    def next(self, row: int, sequence: int) -> int:
        """A token from the logits of this row of the last batch."""
        if self._chain:
            return int(llama_cpp.llama_sampler_sample(self._chain, self._context, row))
        logits = self._logits(row)
        token = int(logits.argmax())
        if self._grammars:
            grammar = self._grammars[sequence]
            if _allowed(grammar, np.array([token], np.int32), logits[token : token + 1])[0] == -np.inf:
                token = int(_allowed(grammar, np.arange(self._size, dtype=np.int32), logits).argmax())
            llama_cpp.llama_sampler_accept(grammar, token)
        return token

    def _logits(self, row: int) -> NDArray[np.float32]:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.c_void_p).value
        assert address is not None, "logits were asked for"
        return np.frombuffer((ctypes.c_float * self._size).from_address(address), np.float32)


def _allowed(grammar: object, tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logits, minus infinity where the grammar refuses the token."""
    candidates = np.zeros(len(tokens), [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    candidates["id"], candidates["logit"] = tokens, logits
    data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(data, len(tokens), -1, False)
    llama_cpp.llama_sampler_apply(grammar, ctypes.byref(array))
    found: NDArray[np.float32] = candidates["logit"]
    return found


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


def requantised(gguf: Path, kind: str) -> Path:
    """The same model in another format, converted once by llama.cpp itself and stored beside the first."""
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    target = gguf.with_name(f"{gguf.stem.split('.')[0]}.{kind}.gguf")
    if not target.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = {
            "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
            "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
        }[kind]
        options.allow_requantize = True
        partial = target.with_suffix(".partial")
        code = llama_cpp.llama_model_quantize(
            str(gguf).encode(), str(partial).encode(), ctypes.byref(options)
        )
        if code:
            raise RuntimeError(f"llama.cpp cannot requantise {gguf} to {kind}: {code}")
        partial.rename(target)
    return target
