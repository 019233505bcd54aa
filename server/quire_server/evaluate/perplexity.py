"""``quire-server eval-quality``: measures on a text what quantisation cost a model.

Both models read the same windows of the text and compute in float32, so that only the weights differ and not
the machine's arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quire_server.errors import ConfigError
from quire_server.evaluate import text_windows
from quire_server.models.decoder import Decoder
from quire_server.runner.loader import Checkpoint
from quire_server.text.tokenizer import Tokenizer

WINDOW, MAX_WINDOWS = 512, 64
_CHUNK = 128  # positions whose distributions are compared at once


@dataclass(frozen=True, slots=True)
class Quality:
    """Over all predicted tokens. Losses are mean negative log-likelihoods."""

    num_tokens: int
    loss: float
    original_loss: float
    agreement: float  # how often both have the same likeliest token, 0 to 1

    @property
    def perplexity(self) -> float:
        """Of the quantised model."""
        return exp(self.loss)

    @property
    def original_perplexity(self) -> float:
        """Of the original model."""
        return exp(self.original_loss)

    @property
    def increase(self) -> float:
        """Relative increase of the perplexity."""
        return exp(self.loss - self.original_loss) - 1

    def report(self) -> str:
        """The text of the report."""
        return (
            f"tokens predicted       {self.num_tokens:9,}\n"
            f"perplexity, original   {self.original_perplexity:9.3f}\n"
            f"perplexity             {self.perplexity:9.3f}  ({100 * self.increase:+.2f} %)\n"
            f"same likeliest token   {100 * self.agreement:9.1f} %\n"
        )


def run(model_dir: Path, original_dir: Path, text_file: Path, write: Callable[[str], object]) -> None:
    """Measure and write the report. Raises ConfigError if the text cannot be read or the tokenizers
    differ.
    """
    text = text_windows.read_text(text_file)
    model, original = (
        Checkpoint.open(directory, dtype="float32", quantization_name="none")
        for directory in (model_dir, original_dir)
    )
    ours, theirs = (
        Tokenizer.load(directory).encode(text, add_special_tokens=False)
        for directory in (model_dir, original_dir)
    )
    if ours != theirs:
        raise ConfigError(
            f"{model_dir} and {original_dir} cut the text into other tokens: compare relatives."
        )
    write(measure(model, original, ours).report())


@torch.inference_mode()
def measure(model: Checkpoint, original: Checkpoint, token_ids: Sequence[int]) -> Quality:
    """Over at most 64 windows of 512 tokens. Raises ConfigError if there are fewer than two tokens."""
    if len(token_ids) < 2:
        raise ConfigError(f"The text has {len(token_ids)} tokens: give one like those that are served.")
    length = min(WINDOW, model.config.max_position, original.config.max_position)
    both = [(_read(found, length), found.dtype) for found in (model, original)]
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for start in range(0, min(len(token_ids), length * MAX_WINDOWS), length):
        window = token_ids[start : start + length]
        if len(window) > 1:
            ours, theirs = (text_windows.logits(decoder, window, dtype)[:-1] for decoder, dtype in both)
            sums += sum(_compared(ours, theirs, torch.tensor(window[1:])))
            count += len(window) - 1
    loss, original_loss, agreement = (sums / count).tolist()
    return Quality(count, loss, original_loss, agreement)


def _compared(ours: Tensor, theirs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """f64 [3] for each chunk of positions: both losses, and the number of positions that agree."""
    for p, q, target in zip(ours.split(_CHUNK), theirs.split(_CHUNK), targets.split(_CHUNK), strict=True):
        losses = [functional.cross_entropy(logits, target, reduction="sum") for logits in (p, q)]
        yield torch.stack([*losses, (p.argmax(-1) == q.argmax(-1)).sum()]).double()


def _read(found: Checkpoint, length: int) -> Decoder:
    return found.read(max_len=length, device=torch.device("cpu"), on_progress=lambda loaded, total: None)
