"""What quantisation costs: perplexity, and how often the likeliest next token is that of float32.

The text is Python's own language reference as the standard library ships it (pydoc_data), so that nothing is
downloaded. Imported by ``cpu.py``.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from quire_server.core.model_files import ModelFiles
from quire_server.layers import int8_linear, linear
from quire_server.models import registry, weights
from quire_server.runner.batch import Spans, build
from quire_server.runner.kv_cache import allocate
from quire_server.runner.rows import Rows

WINDOW, WINDOWS = 512, 6
KINDS = {
    "float32": (torch.float32, linear.Linear),
    "bfloat16": (torch.bfloat16, linear.Linear),
    "bfloat16, int8 with lm_head": (torch.bfloat16, int8_linear.Int8Linear),
    "bfloat16, int8 but lm_head": (torch.bfloat16, None),
}


def texts(directory: Path) -> list[list[int]]:
    prose = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(prose[: WINDOW * WINDOWS * 8]).ids
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]


def _factory(kind: object):
    if kind is not None:
        return kind
    return lambda prefixes, *a, **k: (linear.Linear if prefixes == ["lm_head"] else int8_linear.Int8Linear)(
        prefixes, *a, **k
    )


@torch.inference_mode()
def logits(directory: Path, kind: str, windows: list[list[int]]) -> list[torch.Tensor]:
    """float32 [WINDOW, vocab] for each window, by the server's own model."""
    dtype, chosen = KINDS[kind]
    files, factory, device = ModelFiles.open(directory), _factory(chosen), torch.device("cpu")
    config = registry.load(files)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    shards = weights.inspect(files, registry.tensors(config, factory), tied)
    model = registry.build(config, max_len=WINDOW, dtype=dtype, device=device, linear=factory)
    weights.read(files, shards, model.targets(), lambda loaded, total: None)
    model.finish()
    return [_run(model, config, window, dtype) for window in windows]


def _run(model, config, window: list[int], dtype: torch.dtype) -> torch.Tensor:
    caches = allocate(config, WINDOW // 16, 16, dtype=dtype, device=torch.device("cpu"))
    rows = Rows(1, WINDOW, 16)
    rows.tokens[0] = window
    rows.block_table[0] = range(WINDOW // 16)
    step = _Step((0,), (0,), (WINDOW,), (True,))
    batch = build(step, Spans.of(step), rows, config.num_kv_heads, (None,))
    return model(_with_all_samples(batch), caches).float()


class _Step:
    def __init__(self, rows, starts, num_tokens, samples) -> None:
        self.rows, self.starts, self.num_tokens, self.samples = rows, starts, num_tokens, samples


def _with_all_samples(batch):
    return type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "sample_rows"},
        sample_rows=torch.arange(WINDOW),
    )


def compare(directory: Path) -> str:
    """A table over the kinds of arithmetic."""
    windows = texts(directory)
    lines = ["| arithmetic | perplexity | likeliest token as float32 |", "|---|---:|---:|"]
    truth: list[torch.Tensor] = []
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
        lines.append(f"| {kind} | {perplexity:.3f} | {100 * agreement:.1f} % |")
    return "\n".join([*lines, "", f"{WINDOWS} windows of {WINDOW} tokens of Python's language reference."])
