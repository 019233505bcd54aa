"""Tokens per second of an embedder beside transformers, in one run, with the same threads and batches:

    python -m bench.embeddings MODEL_DIRECTORY

Texts have mixed lengths, as documents have. transformers gets batches of texts that are sorted by length, so
that it pads as little as it can.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModel

from bench.compare import table
from quire_server.core.request import PoolingParams
from quire_server.runner import pooling_model
from quire_server.runner.config import RunnerConfig
from quire_server.runner.pooling_model import Text

_STEP_TOKENS = 512
_BATCH = 16  # texts of a batch of transformers

Texts = Sequence[tuple[int, ...]]


def inputs(count: int, vocab_size: int, longest: int) -> list[tuple[int, ...]]:
    """Texts of 8 to 128 tokens, by a fixed seed."""
    chance = random.Random(0)
    lengths = [min(longest, chance.randint(8, 128)) for _ in range(count)]
    return [tuple(chance.randrange(vocab_size) for _ in range(length)) for length in lengths]


def quire(directory: Path, texts: Texts) -> Callable[[], object]:
    """Steps of whole texts, in the order in which they come."""
    options = RunnerConfig(device="cpu", dtype="float32", max_num_seqs=64)
    model = pooling_model.load(directory, options, "auto", lambda loaded, total: None, None).model
    steps: list[list[Text]] = [[]]
    room = _STEP_TOKENS
    for one in texts:
        if len(one) > room:
            steps.append([])
            room = _STEP_TOKENS
        steps[-1].append(Text(one, PoolingParams()))
        room -= len(one)
    return lambda: [model(step) for step in steps if step]


def transformers(directory: Path, texts: Texts) -> Callable[[], object]:
    """Padded batches of texts of about the same length."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    ordered = sorted(texts, key=len)
    batches = []
    for first in range(0, len(ordered), _BATCH):
        batch = ordered[first : first + _BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([one + (0,) * (longest - len(one)) for one in batch])
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in batch])
        batches.append({"input_ids": ids, "attention_mask": mask})
    return lambda: [model(**batch).last_hidden_state.mean(1) for batch in batches]


@torch.inference_mode()
def report(directory: Path, count: int = 256, rounds: int = 5) -> str:
    """The best of some rounds of each, in turns."""
    config = AutoModel.from_pretrained(directory).config
    texts = inputs(count, config.vocab_size, config.max_position_embeddings // 2)
    calls = {"Quire": quire(directory, texts), "transformers": transformers(directory, texts)}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    tokens = sum(map(len, texts))
    rows = [[name, f"{tokens / seconds:,.0f}"] for name, seconds in best.items()]
    rows.append(["ratio", f"{best['transformers'] / best['Quire']:.2f}"])
    return table(["", "tokens/s"], rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Tokens per second of an embedder beside transformers.")
    parser.add_argument("model", type=Path)
    print(report(parser.parse_args().model))


if __name__ == "__main__":
    main()
