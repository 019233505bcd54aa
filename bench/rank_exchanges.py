"""What ranks exchange in a step, counted by rank 0's communicator, beside the formula (used by
``bench.distributed``): 2 sums a layer and 1 for the embedding, of all tokens, and 1 gather for those that are
sampled.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig

from bench.compare import table
from bench.engine_processes import EngineProcesses
from bench.tensor_parallel import write_model

RANKS = (2, 4)
ITEM = 4  # bytes of a float32
MODEL = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1000,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
FLAGS = (
    *("--dtype", "float32", "--quantization", "none", "--num-gpu-blocks-override", "256"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "1024"),
)
BATCHES = ((1, 1), (7, 5), (40, 20))  # (tokens of a prompt, how many)
NEW_TOKENS = 4


class Exchanged(NamedTuple):
    """Of one step."""

    calls: int
    bytes: int


def formula(ranks: int, tokens: int, sampled: int, *, is_greedy: bool) -> Exchanged:
    """Of a step that computes and samples so many tokens. Of a greedy token a rank gives the largest logit
    and its number, else all logits of its part of the vocabulary, which is padded to a multiple of 16.
    """
    sums, part = 2 * MODEL.num_hidden_layers + 1, -(-MODEL.vocab_size // (16 * ranks)) * 16
    gathered = sampled * (2 if is_greedy else part)
    return Exchanged(sums + 1, (sums * tokens * MODEL.hidden_size + gathered) * ITEM)


HEADS = [
    "ranks",
    "tokens are",
    "tokens of a step",
    "sampled",
    "steps",
    "calls (formula)",
    "bytes of a rank (formula)",
    "equal",
]


def rows() -> list[list[str]]:
    """One for each number of ranks and kind of step."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MODEL)
        for ranks in RANKS:
            with EngineProcesses(Path(folder), FLAGS, ranks=ranks) as engine:
                for (length, count), is_greedy in itertools.product(BATCHES, (True, False)):
                    temperature = 0.0 if is_greedy else 1.0
                    first, *others = engine.run(length, count, NEW_TOKENS, temperature=temperature)
                    found += [_row(ranks, steps, is_greedy=is_greedy) for steps in ([first], others)]
    return found


def _row(ranks: int, steps: list[dict[str, Any]], *, is_greedy: bool) -> list[str]:
    expected = [formula(ranks, step["tokens"], step["sampled"], is_greedy=is_greedy) for step in steps]
    counted = [Exchanged(step["calls"], step["bytes"]) for step in steps]
    equal = sum(one == other for one, other in zip(expected, counted, strict=True))
    return [
        str(ranks),
        "greedy" if is_greedy else "drawn",
        *(str(cell) for cell in (steps[0]["tokens"], steps[0]["sampled"], len(steps))),
        *(f"{ours:,} ({theirs:,})" for ours, theirs in zip(counted[0], expected[0], strict=True)),
        f"{equal} of {len(steps)}",
    ]


def report() -> str:
    """The table, and where it is not the formula."""
    return table(HEADS, rows())
