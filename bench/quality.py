"""The cost of int8 and int4 in quality: perplexity, and how often the likeliest next token is that of float32
(a section of ``bench.cpu``).

The text is Python's language reference from the standard library (pydoc_data), so nothing is downloaded.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.compare import table
from quire_server.evaluate.text_windows import logits as window_logits
from quire_server.layers.int4_linear import make_int4_linear
from quire_server.layers.int8_linear import Int8Linear
from quire_server.layers.linear import Linear, LinearFactory, LinearShape
from quire_server.model_dir.files import ModelFiles
from quire_server.models import registry, weights

WINDOW, WINDOWS = 512, 6


def _all_but_head(shape: LinearShape) -> Linear:
    """A LinearFactory."""
    return Linear(shape) if list(shape.prefixes) == ["lm_head"] else Int8Linear(shape)


KINDS: dict[str, tuple[torch.dtype, LinearFactory]] = {
    "float32": (torch.float32, Linear),
    "bfloat16": (torch.bfloat16, Linear),
    "float32, int8 with lm_head": (torch.float32, Int8Linear),
    "bfloat16, int8 with lm_head": (torch.bfloat16, Int8Linear),
    "bfloat16, int8 but lm_head": (torch.bfloat16, _all_but_head),
    "float32, int8": (torch.float32, Int8Linear),
    "float32, int4 with lm_head in int8": (torch.float32, make_int4_linear),
}


def texts(directory: Path, count: int) -> list[list[int]]:
    """Windows of token ids."""
    prose = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(prose[: WINDOW * count * 8]).ids
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(count)]


@torch.inference_mode()
def logits(directory: Path, kind: str, windows: list[list[int]]) -> list[Tensor]:
    """float32 [WINDOW, vocab] for each window, by the server's own model."""
    dtype, factory = KINDS[kind]
    files, device = ModelFiles.open(directory), torch.device("cpu")
    config = registry.load(files)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    shards = weights.inspect(files, registry.tensors(config, factory), tied)
    model = registry.build(config, max_len=WINDOW, dtype=dtype, device=device, linear=factory)
    weights.read(files, shards, model.targets(), lambda loaded, total: None)
    model.finish()
    return [window_logits(model, window, dtype) for window in windows]


def compare(directory: Path, count: int = WINDOWS) -> str:
    """A table over the kinds of arithmetic."""
    windows = texts(directory, count)
    rows = list[list[str]]()
    truth: list[Tensor] = []
    for kind in KINDS:
        outputs = logits(directory, kind, windows)
        losses = [
            torch.nn.functional.cross_entropy(output[:-1], torch.tensor(window[1:]))
            for output, window in zip(outputs, windows, strict=True)
        ]
        truth = truth or [output.argmax(-1) for output in outputs]
        same = [
            (output.argmax(-1) == best).float().mean() for output, best in zip(outputs, truth, strict=True)
        ]
        perplexity, agreement = torch.stack(losses).mean().exp().item(), torch.stack(same).mean().item()
        rows.append([kind, f"{perplexity:.3f}", f"{100 * agreement:.1f} %"])
    heads = ["arithmetic", "perplexity", "likeliest token as float32"]
    return table(heads, rows) + (
        f"\n\n{len(windows)} windows of {WINDOW} tokens of Python's language reference."
    )
