"""The engines that ``bench.cpu`` compares with: their interface, and transformers.

Every engine gets the same token ids, draws tokens in the same way, and is timed with the same clock, without
tokenizing. llama.cpp is in ``llama``, because it is built only for the benchmark.
"""

import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import transformers
from torch import Tensor


class Drawing(NamedTuple):
    """How tokens are drawn. ``schema``: a JSON schema that answers follow; empty: any text."""

    temperature: float = 0.0
    top_p: float = 1.0
    schema: str = ""


GREEDY, SAMPLED = Drawing(), Drawing(0.7, 0.95)


class Engine(Protocol):
    """Prefills all prompts and decodes them together, each until its number of new tokens: (seconds of
    prefill, (streams, seconds) of each decode step).
    """

    def run(
        self, prompts: list[list[int]], answers: list[int], /
    ) -> tuple[float, list[tuple[int, float]]]: ...

    def close(self) -> None: ...


class Transformers:
    """The forward pass of ``generate`` and its warpers, without its bookkeeping: a little faster than what
    users get. It has no schemas.
    """

    def __init__(self, directory: Path, drawing: Drawing = GREEDY) -> None:
        self._warpers = transformers.LogitsProcessorList()
        if drawing.temperature:
            self._warpers.append(transformers.TemperatureLogitsWarper(drawing.temperature))
            self._warpers.append(transformers.TopPLogitsWarper(drawing.top_p))
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def close(self) -> None:
        """Nothing to free."""

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], answers: list[int]) -> tuple[float, list[tuple[int, float]]]:
        """As in ``Engine``; requests that are complete leave the batch."""
        start = time.perf_counter()
        cache = transformers.DynamicCache()
        output = self._model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = self._next(output.logits)
        prefill, steps, left = time.perf_counter() - start, [], [n - 1 for n in answers]
        while any(left):
            if not all(left):
                stay = [i for i, n in enumerate(left) if n]
                cache.batch_select_indices(torch.tensor(stay))
                token, left = token[stay], [left[i] for i in stay]
                continue
            start = time.perf_counter()
            output = self._model(token, past_key_values=cache, use_cache=True)
            token = self._next(output.logits)
            steps.append((len(left), time.perf_counter() - start))
            left = [n - 1 for n in left]
        return prefill, steps

    def _next(self, logits: Tensor) -> Tensor:
        """[B, 1] from the last of [B, T, vocab]."""
        if not self._warpers:
            return logits[:, -1:].argmax(-1)
        scores: Tensor = self._warpers(None, logits[:, -1])
        return torch.multinomial(scores.softmax(-1), 1)
