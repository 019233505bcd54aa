"""docs/sizing.md: memory and concurrency of common models, computed by quire_sizing."""

from __future__ import annotations

from quire_sizing import memory
from quire_sizing.memory import Accelerator, Serving
from quire_sizing.model import ModelShape

GB = 10**9
_CARD = Accelerator(memory=80 * GB, bandwidth=3350 * GB)


def _model(billions: float, layers: int, kv_heads: int, hidden: int) -> ModelShape:
    return ModelShape(
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

`kubectl quire size` checks whether a model fits an accelerator, before you request one:

```
kubectl quire size MODEL --memory 80GB --max-model-len 8192 --max-num-seqs 32
kubectl quire size MODEL --profile h100-80gb
kubectl quire size MODEL --max-model-len 8192
```

`MODEL` is a local directory with a model's `config.json`, or that file: it need not contain the weights.
The output has the size of the weights, the KV cache per token, the number of requests of the given length
that fit at once, and what to change if none fits; `-o json` is for programs. The exit code is 0 if at least
one such request fits, 3 if none does, and 1 for an invalid file or argument. `--weight-bits`, `--kv-bits`
and `--gpu-memory-utilization` correspond to fields of an `LLMDeployment`; with `--bandwidth 3.35TB/s` the
output has the upper bound of tokens per second for one stream.

`--tensor 4` sizes each of four accelerators that [share the layers](parallelism.md): its part of the weights
and of the cache. A number that does not divide the model is refused with those that do.

`--pipeline 2` sizes an accelerator of each of two [stages](parallelism.md#stages-of-layers), with as many
ranks each as `--tensor` says: the layers that the server gives to each, their weights, what remains for the
cache, and the share of time in which the stages are busy. The stage with room for the fewest tokens decides
how many requests fit, and the numbers above the table are its own. All layers count as equally large.

`--nodes 2` says over how many [nodes](parallelism.md#groups-of-nodes) they are spread: the output counts the
accelerators of each, and advises against ranks that share layers and are on several.

`--staging-memory 4Gi` is the memory of a pod through which
[prefill and decode pods](disaggregation.md#on-gpus) exchange KV blocks: the output has how many tokens fit,
and `--host-memory` is checked without it. Each role is sized by a call of its own.

`--max-adapters 8 --max-adapter-rank 32` are [LoRA adapters](adapters.md): each has a place on the accelerator
with room for the highest rank of every matrix, which is no room for the cache. The host keeps all that are
loaded in a quarter of what its memory has left: with `--host-memory` the output says how many of that rank
fit there at most; adapters of lower ranks or fewer matrices take less. The 64 MiB in which
[responses](responses.md#what-is-kept) are kept count as memory of the host, too.

`--profile` takes memory and bandwidth from the cluster's AcceleratorProfile of that name. Without a
cluster, or without such a profile in it, they come from [the shipped profiles](placement.md); the output
says which was used. The numbers are the same as in the condition `FitsAccelerator`. Several profiles
(`--profile a --profile b`), or all of them where neither `--profile` nor `--memory` is given, are compared in
a table: requests at once, the longest context, the bound of one stream, and `costPerHour`, the cheapest of
those that fit first.

## Several models on one accelerator

```
kubectl quire size LARGE SMALL --together --memory 80GB --max-model-len 8192 --max-num-seqs 32
```

`--together` adds up what each of several models takes of one accelerator: its weights, its working memory,
and the KV cache of its requests. If the sum for one request of each is above what may be used, they are
refused with both numbers, and the exit code is 3; else the output has the
`resources.gpu.memoryPercent` that each needs. Quire does not give one accelerator to several pods: the
device plugin has to (time-slicing or MPS), and it was not run on a GPU. Models that do not fit together can
[take turns](autoscaling.md#several-models-on-one-accelerator); then each has to fit alone.

## Installing the command

`kubectl-quire` is part of the Python package (`pip install .` in a clone); it needs no cluster and none of
the package's extras.

Weights, KV cache and places for adapters are exact: tests compare the parameters of every served family with
those that transformers counts, and the bytes per token and per place with the server's own. The working
memory is an estimate that was not measured on a GPU; the server measures it when it starts, and uses that.
Scales of quantised weights (0.1 to 0.5 bits for each weight) are not counted.

## KV cache and weights

A token has 2 x layers x KV heads x head size numbers in the cache. GB are 10^9 bytes.
"""


def page() -> str:
    """The whole page."""
    lines = [
        HEAD,
        "| model | one token, 16 bits | 4,096 tokens | 131,072 tokens | weights, 16 bits | 4 bits |",
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
        "\n## Concurrent requests on 80 GB, with a memory utilization of 0.90\n",
        "| model | weights | 4,096 tokens | 8,192 | 16,384 | one stream at most, 3.35 TB/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        for bits in (16, 4):
            lines.append(f"| {name} | {bits} bits | {_fits(model, bits)} |")
    return "\n".join(lines) + "\n"


def _fits(model: ModelShape, bits: int) -> str:
    cells = []
    for length in (4096, 8192, 16384):
        found = memory.budget(model, _CARD, Serving(max_model_len=length, weight_bits=bits))
        cells.append(str(found.concurrency or "none"))
    bound = memory.decode_bound(_CARD.bandwidth, memory.weight_bytes(model.parameters, bits))
    fits = cells[0] != "none" or cells[-1] != "none"
    return " | ".join([*cells, f"{bound:,.0f} tok/s" if fits else "-"])
