"""``quire-server draft-alignment``: measures on a text how often a draft model's tokens would be accepted,
before it is deployed.

Both models read the same windows of the text. At every position three numbers compare their distributions p
(the model's) and q (the draft's):

- whether the likeliest tokens agree: the acceptance rate of greedy sampling;
- the probability that both sample the same token with the same Gumbel noise, as this server does: the sum
  over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri, Musco & Suresh 2024);
- sum of min(p, q): the acceptance rate of rejection sampling (Leviathan et al. 2023).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_server.core.draft_length import expected_tokens
from quire_server.errors import RequestError
from quire_server.evaluate import text_windows
from quire_server.models.decoder import Decoder
from quire_server.runner.loader import Checkpoint, open_as_draft, refuse_misfit
from quire_server.text.tokenizer import Tokenizer

WINDOW = 256  # tokens that are read from their beginning
_MAX_WINDOWS = 32
_GOOD, _POOR = 0.7, 0.5
_DRAFTS = 4
_CHUNK = 32  # positions whose distributions are compared at once


@dataclass(frozen=True, slots=True)
class Alignment:
    """Means over the positions of a text, 0 to 1."""

    num_tokens: int
    greedy: float
    coupled: float
    rejection: float

    @property
    def verdict(self) -> str:
        """good, fair or poor, by the lower of greedy and sampled acceptance."""
        mean = min(self.greedy, self.coupled)
        return "good" if mean > _GOOD else "poor" if mean < _POOR else "fair"

    def report(self) -> str:
        """The text of the report."""
        bring = expected_tokens(min(self.greedy, self.coupled), _DRAFTS)
        return (
            f"tokens compared        {self.num_tokens:7,}\n"
            f"acceptance, greedy     {100 * self.greedy:7.1f} %  (the likeliest tokens agree)\n"
            f"acceptance, drawn      {100 * self.coupled:7.1f} %  (temperature 1, the same noise)\n"
            f"  by rejection instead {100 * self.rejection:7.1f} %  (what resampling would reach)\n"
            f"{self.verdict}: {bring:.1f} tokens a step with {_DRAFTS} drafts "
            f"(more than {_GOOD:.0%} is good, less than {_POOR:.0%} poor)\n"
        )


def run(model_dir: Path, draft_dir: Path, text_file: Path, write: Callable[[str], object]) -> None:
    """Measure and write the report. Raises ConfigError if the draft does not fit or the text cannot be read,
    RequestError if it is too short.
    """
    text = text_windows.read_text(text_file)
    model = Checkpoint.open(model_dir, dtype="auto", quantization_name="auto")
    draft = open_as_draft(draft_dir)
    refuse_misfit(model, draft)
    token_ids = Tokenizer.load(model_dir).encode(text, add_special_tokens=False)
    if len(token_ids) < 2:
        raise RequestError(f"{text_file} has {len(token_ids)} tokens: give a text like those to be served.")
    write(measure(model, draft, token_ids).report())


@torch.inference_mode()
def measure(model: Checkpoint, draft: Checkpoint, token_ids: list[int]) -> Alignment:
    """Over at most 32 windows of 256 tokens."""
    both = [(_read(found), found.dtype) for found in (model, draft)]
    sums, count = torch.zeros(3), 0
    for start in range(0, min(len(token_ids), WINDOW * _MAX_WINDOWS), WINDOW):
        window = token_ids[start : start + WINDOW]
        ours, theirs = (text_windows.logits(decoder, window, dtype) for decoder, dtype in both)
        width = min(ours.shape[1], theirs.shape[1])
        for p, q in zip(ours[:, :width].split(_CHUNK), theirs[:, :width].split(_CHUNK), strict=True):
            sums += torch.stack([values.sum() for values in agreement(p, q)])
        count += len(window)
    greedy, coupled, rejection = (sums / count).tolist()
    return Alignment(count, greedy, coupled, rejection)


def agreement(ours: Tensor, theirs: Tensor) -> Iterator[Tensor]:
    """Greedy, coupled and rejection acceptance f32 [T] for logits f32 [T, V] of the two models."""
    yield (ours.argmax(-1) == theirs.argmax(-1)).float()
    log_p, log_q = torch.log_softmax(ours.double(), -1), torch.log_softmax(theirs.double(), -1)
    # Sorted by p / q: for the y after x, p_y / p_x is the larger of the two quotients.
    order = (log_p - log_q).argsort(dim=-1)
    p, q = log_p.gather(-1, order).exp(), log_q.gather(-1, order).exp()
    behind = p.flip(-1).cumsum(-1).flip(-1)
    before = q.cumsum(-1) - q
    yield (1 / (behind / p + before / q)).nan_to_num(0.0).sum(-1).float()
    yield torch.minimum(p, q).sum(-1).float()


def _read(found: Checkpoint) -> Decoder:
    return found.read(max_len=WINDOW, device=torch.device("cpu"), on_progress=lambda loaded, total: None)
