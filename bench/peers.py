"""The engines that ``cpu.py`` puts side by side, each behind the same two questions: prefill and decode.

Imported by ``cpu.py`` only. Every engine gets the same token ids, decodes greedily, and is timed on the
same clock; nobody's tokenizer or sampling counts.
"""

import ctypes
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import llama_cpp
import torch
import transformers

from quire_server.core.request import Request, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.runner.model_runner import ModelRunner, RunnerOptions

CONTEXT = 1024 + 160
MAX_STREAMS = 32
CHUNK = 1024


class Engine(Protocol):
    """``run`` prefills all prompts and decodes them together; (prefill seconds, decode seconds per step)."""

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]: ...


class Quire:
    """Scheduler and runner in this process."""

    def __init__(self, directory: Path, *, dtype: str, quantization: str) -> None:
        options = RunnerOptions(
            dtype=dtype,
            quantization=quantization,
            max_model_len=CONTEXT,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=MAX_STREAMS,
            kv_cache_memory_bytes=3 << 30,
        )
        self.runner = ModelRunner.load(directory, options, lambda loaded, total: None)

    def scheduler(self, *, chunk: int = CHUNK, prefix_caching: bool = False) -> Scheduler:
        runner = self.runner
        config = SchedulerConfig(
            MAX_STREAMS, chunk, runner.max_model_len, runner.num_blocks, 16, prefix_caching
        )
        return Scheduler(config, eos_token_ids=())

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        scheduler = self.scheduler()
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(new_tokens, temperature=0.0)
            scheduler.add(Request(str(number), tuple(prompt), sampling, 0.0))
        prefill, steps, start = 0.0, [], time.perf_counter()
        while (step := scheduler.schedule()) is not None:
            is_decode = step.total_tokens == len(step.rows) == len(prompts)
            scheduler.commit(step, self.runner.run(step))
            now = time.perf_counter()
            if is_decode:
                steps.append(now - start)
            elif not steps:
                prefill += now - start
            start = now
        return prefill, steps


class Transformers:
    """The forward pass of ``generate`` without its bookkeeping: a little faster than what users get."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        start = time.perf_counter()
        cache = transformers.DynamicCache()
        output = self.model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        prefill, steps = time.perf_counter() - start, []
        for _ in range(new_tokens - 1):
            start = time.perf_counter()
            output = self.model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            steps.append(time.perf_counter() - start)
        return prefill, steps


class LlamaCpp:
    """Several sequences in one ``llama_decode`` call, by the low-level interface."""

    def __init__(self, gguf: Path, streams: int, threads: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        model_options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = CONTEXT * streams, streams, True
        options.n_batch, options.n_ubatch = CHUNK, 512
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp cannot load {gguf}")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        start, tokens = time.perf_counter(), []
        for number, prompt in enumerate(prompts):
            for first in range(0, len(prompt), CHUNK):
                chunk = prompt[first : first + CHUNK]
                rows = [(token, first + i, number) for i, token in enumerate(chunk)]
                self._decode(rows, [len(rows) - 1])
            tokens.append(self._best(len(rows) - 1))
        prefill, steps, length = time.perf_counter() - start, [], len(prompts[0])
        for step in range(new_tokens - 1):
            start = time.perf_counter()
            self._decode([(token, length + step, i) for i, token in enumerate(tokens)], range(len(tokens)))
            tokens = [self._best(i) for i in range(len(tokens))]
            steps.append(time.perf_counter() - start)
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
        buffer = (ctypes.c_float * self.vocab_size).from_address(address)
        return int(torch.frombuffer(buffer, dtype=torch.float32).argmax())


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


def requantised(gguf: Path, kind: str) -> Path:
    """The same model in another format of llama.cpp's, made once by llama.cpp itself, beside the first."""
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
