"""The page docs/sizing.md: known figures, computed by quire_sizing. Called by docs.generate."""

from __future__ import annotations

from quire_sizing import memory
from quire_sizing.memory import Accelerator, Serving
from quire_sizing.model import Model

GB = 10**9
_CARD = Accelerator(memory=80 * GB, bandwidth=3350 * GB)


def _model(billions: float, layers: int, kv_heads: int, hidden: int) -> Model:
    return Model(
        parameters=int(billions * 1e9),
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_size=128,
        hidden_size=hidden,
        vocab_size=32000,
        longest=131072,
    )


MODELS = {
    "Llama 2 7B": _model(7, 32, 32, 4096),
    "Llama 2 13B": _model(13, 40, 40, 5120),
    "Llama 3.1 8B": _model(8, 32, 8, 4096),
    "70B, 64 KV heads": _model(70, 80, 64, 8192),
    "70B, 8 KV heads (as published)": _model(70, 80, 8, 8192),
}

HEAD = """# Does it fit?

Before a GPU waits for a model that it cannot hold:

```
kubectl quire size MODEL --memory 80GB --max-model-len 8192 --max-num-seqs 32
kubectl quire size MODEL --profile h100-80gb
```

`MODEL` is a folder with a `config.json`, or that file. The answer has the weights, what one token takes of
the KV cache, how many requests of the wanted length fit at once, and what to change if none does; `-o json`
is for programs. It ends with 0 when at least one such request fits, 3 when none does, 1 on a file or a
limit that is none. `--gpus`, `--weight-bits`, `--kv-bits` and `--gpu-memory-utilization` are what the
fields of an `LLMDeployment` say; `--bandwidth 3.35TB/s` adds the most tokens a second that one stream can
get.

`--profile` takes memory and bandwidth from the cluster's AcceleratorProfile of that name, and without a
cluster, or where it has none, from [those that are shipped](placement.md); the answer says from which. The
numbers are those of the condition `FitsAccelerator`.

`kubectl-quire` comes with the Python package (`pip install .` in a clone); it needs no cluster and none of
the package's extras.

Weights and KV cache are exact: the parameters of every family that the server runs are compared with those
that transformers counts, the bytes of a token with the server's own. The working memory is an estimate, not
measured on a GPU; the server measures its own when it starts, and goes by that. Scales of quantised weights
(0.1 to 0.5 bits for each) are not counted.

## KV cache and weights

A token takes 2 x layers x KV heads x head size numbers. GB are 10^9 bytes.
"""


def page() -> str:
    """The whole page."""
    lines = [
        HEAD,
        "| model | a token, 16 bits | 4,096 tokens | 131,072 tokens | weights, 16 bits | 4 bits |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        each = memory.kv_bytes_per_token(model)
        weights = [memory.weight_bytes(model.parameters, bits) / GB for bits in (16, 4)]
        lines.append(
            f"| {name} | {each:,} B | {4096 * each / GB:.2f} GB | {131072 * each / GB:.1f} GB | "
            f"{weights[0]:g} GB | {weights[1]:g} GB |"
        )
    lines += [
        "\n## Requests at once on 80 GB, at 0.90 of it\n",
        "| model | weights | 4,096 tokens | 8,192 | 16,384 | one stream at most, 3.35 TB/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        for bits in (16, 4):
            lines.append(f"| {name} | {bits} bits | {_fits(model, bits)} |")
    return "\n".join(lines) + "\n"


def _fits(model: Model, bits: int) -> str:
    cells = []
    for length in (4096, 8192, 16384):
        found = memory.budget(model, _CARD, Serving(max_model_len=length, weight_bits=bits))
        cells.append(str(found.concurrency or "none"))
    bound = memory.decode_bound(_CARD.bandwidth, memory.weight_bytes(model.parameters, bits))
    fits = cells[0] != "none" or cells[-1] != "none"
    return " | ".join([*cells, f"{bound:,.0f} tok/s" if fits else "-"])
