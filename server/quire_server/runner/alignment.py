"""``quire-server draft-alignment``: how often a draft model would be right, measured on a text before anyone
deploys it.

Called by the entry point. Both models read the same windows of the text; at every position three numbers
compare their distributions p (the model's) and q (the draft's):

- whether their likeliest tokens agree: what is accepted of greedy answers;
- the probability that both draw the same token with the same Gumbel noise, which is what this server does:
  the sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri, Musco & Suresh 2024);
- sum of min(p, q): what accepting by chance and drawing again would reach (Leviathan et al. 2023).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_server.core.draft_length import expected_tokens
from quire_server.core.errors import RequestError
from quire_server.models.decoder import Decoder
from quire_server.runner import drafts, windows
from quire_server.runner.checkpoint import Checkpoint
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
        """good, fair or poor, by the worse of greedy and drawn answers."""
        mean = min(self.greedy, self.coupled)
        return "good" if mean > _GOOD else "poor" if mean < _POOR else "fair"

    def report(self) -> str:
        """For people."""
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
    """Measure and write the report. Raises ConfigError where the draft does not fit or the text is none,
    RequestError where it is too short.
    """
    text = windows.read_text(text_file)
    model = Checkpoint.open(model_dir, dtype="auto", quantization_name="auto")
    draft = drafts.open_as_draft(draft_dir)
    drafts.refuse_misfit(model, draft)
    token_ids = Tokenizer.load(model_dir).encode(text, add_special_tokens=False)
    if len(token_ids) < 2:
        raise RequestError(f"{text_file} has {len(token_ids)} tokens: give a text like those to be served.")
    write(measure(model, draft, token_ids).report())


@torch.inference_mode()
def measure(model: Checkpoint, draft: Checkpoint, token_ids: list[int]) -> Alignment:
    """Of at most 32 windows of 256 tokens, each read from its beginning."""
    both = [(_read(found), found.dtype) for found in (model, draft)]
    sums, count = torch.zeros(3), 0
    for start in range(0, min(len(token_ids), WINDOW * _MAX_WINDOWS), WINDOW):
        window = token_ids[start : start + WINDOW]
        ours, theirs = (windows.logits(decoder, window, dtype) for decoder, dtype in both)
        width = min(ours.shape[1], theirs.shape[1])
        for p, q in zip(ours[:, :width].split(_CHUNK), theirs[:, :width].split(_CHUNK), strict=True):
            sums += torch.stack([values.sum() for values in agreement(p, q)])
        count += len(window)
    greedy, coupled, rejection = (sums / count).tolist()
    return Alignment(count, greedy, coupled, rejection)


def agreement(ours: Tensor, theirs: Tensor) -> Iterator[Tensor]:
    """Greedy, coupled and rejection's acceptance f32 [T] for logits f32 [T, V] of the two models."""
    yield (ours.argmax(-1) == theirs.argmax(-1)).float()
    log_p, log_q = torch.log_softmax(ours.double(), -1), torch.log_softmax(theirs.double(), -1)
    # In the order of p / q: for x, the y behind it are those for which p_y / p_x is the greater quotient.
    order = (log_p - log_q).argsort(dim=-1)
    p, q = log_p.gather(-1, order).exp(), log_q.gather(-1, order).exp()
    behind = p.flip(-1).cumsum(-1).flip(-1)
    before = q.cumsum(-1) - q
    yield (1 / (behind / p + before / q)).nan_to_num(0.0).sum(-1).float()
    yield torch.minimum(p, q).sum(-1).float()


def _read(found: Checkpoint) -> Decoder:
    return found.read(max_len=WINDOW, device=torch.device("cpu"), on_progress=lambda loaded, total: None)
