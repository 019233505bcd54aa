"""The engines that ``bench.cpu`` compares with: their interface, and transformers.

Every engine gets the same token ids, decodes greedily, and is timed with the same clock, without tokenizing
and sampling. llama.cpp is in ``llama``, because it is built only for the benchmark.
"""

import time
from pathlib import Path
from typing import Protocol

import torch
import transformers


class Engine(Protocol):
    """Prefills all prompts and decodes them together, each until its number of new tokens: (seconds of
    prefill, (streams, seconds) of each decode step).
    """

    def run(
        self, prompts: list[list[int]], answers: list[int], /
    ) -> tuple[float, list[tuple[int, float]]]: ...

    def close(self) -> None: ...


class Transformers:
    """The forward pass of ``generate`` without its bookkeeping: a little faster than what users get."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def close(self) -> None:
        """Nothing to free."""

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], answers: list[int]) -> tuple[float, list[tuple[int, float]]]:
        """As in ``Engine``; requests that are complete leave the batch."""
        start = time.perf_counter()
        cache = transformers.DynamicCache()
        output = self._model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        prefill, steps, left = time.perf_counter() - start, [], [n - 1 for n in answers]
        while any(left):
            if not all(left):
                stay = [i for i, n in enumerate(left) if n]
                cache.batch_select_indices(torch.tensor(stay))
                token, left = token[stay], [left[i] for i in stay]
                continue
            start = time.perf_counter()
            output = self._model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            steps.append((len(left), time.perf_counter() - start))
            left = [n - 1 for n in left]
        return prefill, steps
