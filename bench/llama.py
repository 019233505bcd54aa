"""llama.cpp by its low-level interface, with several sequences per call (used by ``bench.cpu``)."""

import ctypes
import time
from collections.abc import Iterable
from pathlib import Path

import llama_cpp
import torch

from bench.engine import CHUNK, CONTEXT


class LlamaCpp:
    """A ``baselines.Engine``. Each sequence has its own KV buffer (not ``kv_unified``), which llama.h calls
    faster without a common prefix.
    """

    def __init__(self, gguf: Path, streams: int, threads: int) -> None:
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
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)

    def close(self) -> None:
        """Free the memory."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def run(self, prompts: list[list[int]], answers: list[int]) -> tuple[float, list[tuple[int, float]]]:
        """As in ``baselines.Engine``; complete sequences leave the batch and the cache."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        start, tokens = time.perf_counter(), {}
        for number, prompt in enumerate(prompts):
            for first in range(0, len(prompt), CHUNK):
                chunk = prompt[first : first + CHUNK]
                rows = [(token, first + i, number) for i, token in enumerate(chunk)]
                self._decode(rows, [len(rows) - 1])
            tokens[number] = self._best(len(rows) - 1)
        prefill, steps, length = time.perf_counter() - start, [], len(prompts[0])
        for step in range(max(answers) - 1):
            for number in [n for n in tokens if answers[n] == step + 1]:
                llama_cpp.llama_memory_seq_rm(memory, number, -1, -1)
                del tokens[number]
            start = time.perf_counter()
            self._decode([(token, length + step, n) for n, token in tokens.items()], range(len(tokens)))
            tokens = {number: self._best(i) for i, number in enumerate(tokens)}
            steps.append((len(tokens), time.perf_counter() - start))
        return prefill, steps

    def _decode(self, rows: list[tuple[int, int, int]], wanted: Iterable[int]) -> None:
        batch, wanted = self.batch, set(wanted)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, i in wanted
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        address = ctypes.cast(logits, ctypes.c_void_p).value
        assert address is not None, "logits were asked for"
        buffer = (ctypes.c_float * self.vocab_size).from_address(address)
        return int(torch.frombuffer(buffer, dtype=torch.float32).argmax())


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


def requantised(gguf: Path, kind: str) -> Path:
    """The same model in another format, converted once by llama.cpp itself and stored beside the first."""
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
