"""docs/parallelism.md: models that several ranks share, with the arithmetic computed by quire_sizing."""

from __future__ import annotations

from quire_server.core.topology import stage_layers
from quire_sizing import memory
from quire_sizing.model import ModelShape, from_config, rank_kv_heads, rank_parameters, tensor_sizes

MOST = 32  # the largest size that the API takes
GB = 10**9


def _model(
    hidden: int, layers: int, heads: tuple[int, int], width: int, vocab: int, **config: object
) -> ModelShape:
    return from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "intermediate_size": width,
            "vocab_size": vocab,
            "max_position_embeddings": 8192,
            **config,
        }
    )


#: From their config.json.
MODELS = {
    "SmolLM2 135M": _model(576, 30, (9, 3), 1536, 49152, tie_word_embeddings=True),
    "Llama 3.1 8B": _model(4096, 32, (32, 8), 14336, 128256),
    "Qwen3 8B": _model(4096, 36, (32, 8), 12288, 151936, model_type="qwen3", head_dim=128),
    "Mixtral 8x7B": _model(4096, 32, (32, 8), 14336, 32000, model_type="mixtral", num_local_experts=8),
    "Llama 3.1 70B": _model(8192, 80, (64, 8), 28672, 128256),
}

#: A model, a device, and the bytes that it reads in a second.
SUMS = (
    ("SmolLM2 135M", "CPUs that read 50 GB/s each", 50 * GB),
    ("Llama 3.1 8B", "GPUs that read 0.86 TB/s each, on PCIe", 864 * GB),
    ("Llama 3.1 8B", "GPUs that read 3.35 TB/s each", 3350 * GB),
    ("Llama 3.1 70B", "GPUs that read 3.35 TB/s each", 3350 * GB),
)

HEAD = """# Models larger than a device

`parallelism.tensor` divides every layer of a model among several processes, the *ranks* of a pod:

```
kubectl apply -f examples/smollm2-tensor-parallel.yaml
```

```yaml
spec:
  parallelism: {tensor: 3}
  resources: {cpu: 1500m, memory: 3Gi}
```

Each rank reads and keeps its part of the weights and of the KV cache. Rank 0 schedules, samples and
serves; the others compute what it tells them. The answers are those of one rank but for rounding, since
parts are added up in another order: in float32 tests hold greedy answers equal, in bfloat16 a close
choice between two tokens may fall otherwise.

Ranks are processes of one pod, or [on several nodes](#groups-of-nodes) of as many pods; a replica has up to
32. With `resources.gpu` or `profileRef` each has a GPU of its own, and a pod requests one for each of its
ranks ([several GPUs](gpu.md#several-gpus); *not measured*: none of it has run on a GPU). The API server
refuses less than half a CPU for each rank of a pod in `resources.cpu`. Give each a whole one where you can:
in every layer all of them wait for the slowest.

Every other feature of a model that generates text works with any number of ranks
([what works together](matrix.md)); one that [embeds texts](embeddings.md) runs on one rank. Each rank moves
its own heads of a KV block to host memory, to disk and back, and has its part of each
[LoRA adapter](adapters.md#what-works-together). A draft model is not divided: rank 0 has all of it
and drafts while the others wait, so take one that is small beside the model's part on a rank.

## When it helps, and when not

1. **One device, if the model fits.** Nothing is exchanged. A quantised model or a KV cache of one byte an
   element often makes it fit: [Does it fit?](sizing.md)
2. **More replicas** next, for more requests at once: they exchange nothing either, and one that fails
   leaves the others.
3. **Tensor parallelism** where one device does not hold the model, or one stream is too slow. Each rank
   reads its part of the weights in each step, so a stream can become up to that many times faster; the
   sums that the ranks wait for in every layer take a part of that back. It needs a fast connection:
   NVLink or the like. Over PCIe alone several GPUs are often slower than one; `FitsAccelerator` and
   `kubectl quire size --tensor` say so where an AcceleratorProfile has `interconnect: PCIe`.
4. **Pipeline parallelism** where ranks cannot exchange fast enough for that, or where no size divides the
   heads: [stages of layers](#stages-of-layers). It makes no single stream faster.

On CPUs of one machine all ranks share the bandwidth of its memory. Expect about the speed of one process
with as many threads, not more. `python -m bench.distributed` measures both on your machine, and what
ranks exchange, read, hold and lose; `bench/results/distributed.md` has the figures of one.

Two ranks with a thread each, beside one process with two threads (a Llama of 100 M; 2 cores of an AMD EPYC):

| weights, CPU | decode of 1 request | of 8 | of 32 | prefill of 512 |
|---|---:|---:|---:|---:|
| int8, AVX-512 VNNI | 0.83 | 0.84 | 0.91 | 0.87 |
| int8, AVX2 (two runs) | 1.01 to 1.02 | 0.99 to 1.08 | 1.09 to 1.10 | 0.98 to 1.01 |
| float32, AVX2 (two days) | 1.18 to 1.24 | 1.27 to 1.39 | 1.23 to 1.32 | 0.98 to 0.99 |

Memory does not become less in sum. In a pod the ranks have the whole model once, plus what each of them
has whole, plus the memory of a process: measured with SmolLM2 in float32 and a KV cache of 64 MiB, a pod
takes 1,016 MiB with one rank and 1,622 MiB with three, so about 300 MiB for each further rank.
`kvCache.memory` and `hostOffload` are for all ranks together. The memory through which ranks exchange
their parts belongs to the container's; `resources.sharedMemory` need not grow.

## Which sizes work

A size has to divide the query heads, the inner size of the feed-forward and the number of experts. Heads
of keys and values are divided too; where there are more ranks than such heads, each is kept by several
ranks, and the size has to be a multiple of them. Weights that are stored in groups (GPTQ, AWQ, FP8 by
block) allow only sizes that cut no group. The vocabulary needs no divisor: it is padded.

"""

SIZES_TAIL = """
`kubectl quire size MODEL --tensor 4 --pipeline 2` checks sizes against a local config.json, and computes what
[each rank needs](sizing.md). On a cluster the pod
checks it before it reads a weight; it then fails with the reason `ConfigError`, whose message lists the
sizes that work, and replicas of the revision before go on serving:

```
The model cannot be divided among 2 ranks: it has 9 heads, 3 heads of keys and values, and an intermediate
size of 1536. Set --tensor-parallel-size to one of 1, 3.
```

The flag in this message is the field `parallelism.tensor`.

## Bytes of a rank

Weights in 16 bits. A rank has its part of every matrix, its rows of the embedding and of the head, and
whole what is small: norms, routers of experts. A token in the cache takes 2 x layers x its heads of keys
and values x head size numbers.

"""

STEP_TAIL = """
The logits follow in one gather to rank 0: each rank gives vocabulary / tensor numbers for every sampled
position, or 8 bytes, its largest logit and the token, where all requests of the step take the likeliest
token and ask for no log-probabilities. Nothing else is exchanged between the layers. Before a step rank 0
sends a message of some 13 bytes for each running request, and after it gets an answer from each rank.

Multiply by what your connection does: a ring moves up to twice these bytes over every link, and each of
the sums costs at least one latency. A sum of one token is a few KiB, so for single streams the latency is
all that counts.

## Stages of layers

`parallelism.pipeline` gives each of so many stages consecutive layers; with `tensor` too, the ranks of a
stage share each of its layers, and the pod has tensor x pipeline ranks. The first stage has the embedding,
the last one the head; a matrix that is both is on both.

```yaml
spec:
  parallelism: {tensor: 3, pipeline: 2}
  resources: {cpu: "6", memory: 6Gi}
```

Stages are balanced by the bytes that a step reads, not by layers: the head counts like the layers that are
as large, of the embedding a step reads one row for each token. Any number of stages works up to the number
of layers. With `resources.gpu` or `profileRef` each rank of each stage has a
GPU ([how](gpu.md#several-gpus); *not measured*, and never run on one).

"""

STAGES_TAIL = """
One step of other requests is in flight for each stage. A request is in one of them at a time, so with m
streams on p stages the stages are busy for min(1, m / p) of the time, times mean / max of their times where
they are uneven: one stream keeps a third of three stages busy, three keep all of them busy. A token takes as
long as on one device that had all layers, plus p - 1 transfers of two rows of hidden states and one of the
logits. For the same requests in one step a pipeline is not faster than one device; it has p times the memory.
A prompt is computed in one stage after the other, its chunks one by one.

With drafts, with `hostOffload`, and while the canary runs, one step is in flight and the stages take turns;
with a smaller `engine.maxNumSeqs` than stages some are always idle. The server's log says so when it starts.
Greedy answers are those of one stage, and with the same batches to the last bit.

### When stages are faster than ranks that share layers

Take n devices that read weights of W bytes at B bytes a second each, and small steps, which take as long as
the weights take to be read.

| | one stream: seconds for a token | c streams: tokens a second |
|---|---|---|
| `tensor: n` | W / (n B) + (2 layers + 1) x sum | c / (W / (n B) + (2 layers + 1) x sum) |
| `pipeline: n` | W / B + (n - 1) x transfer | c / (W / B + n x transfer), with c of n or more |

So for small steps n stages together give the tokens of one device, and sharing layers is faster as long as
the sums of a step take less than W / B x (1 - 1 / n). One sum may take:

"""

SUMS_TAIL = """
In large steps computing takes the time instead, of prompts above all. Then n stages with n steps in flight
compute as much as n ranks that share layers, and have no sums to wait for; but they are busy only while
there are n requests, since the chunks of one prompt follow each other. As a rule: share layers where
accelerators are connected directly; give stages to what is connected by PCIe or a network, and use them for
many requests at once.

## Groups of nodes

`parallelism.nodes` spreads the ranks of a replica over so many nodes, equally many on each, one pod on each.
The replica is then a *group*: the first pod, the leader, has rank 0 and answers requests, the others are
its workers. `resources` are those of one pod, `replicas` and an autoscaler count groups.

```
kubectl create secret generic smollm2-ranks --from-literal=key=$(openssl rand -hex 32)
kubectl apply -f examples/smollm2-two-nodes.yaml
```

```yaml
spec:
  parallelism: {tensor: 3, pipeline: 2, nodes: 2, authSecretRef: {name: smollm2-ranks}}
```

Ranks are numbered stage by stage, so with as many nodes as stages each stage is on one node, and only
hidden states cross the network between nodes. All ranks are connected by gloo then, also those of one node;
on GPUs by NCCL.

With `resources.gpu` or `profileRef` a pod requests tensor x pipeline / nodes accelerators, one for each of
its ranks, and every pod of the group has the profile's node selector, tolerations and runtime class:

```yaml
spec:
  parallelism: {tensor: 8, pipeline: 2, nodes: 2, authSecretRef: {name: llama-70b-ranks}}
  resources: {cpu: "16", memory: 128Gi, profileRef: {name: h100-80gb}}   # of each pod, with 8 GPUs
```

`examples/two-nodes-gpus.yaml` is the whole object.

Keep the ranks that share layers on one node: `tensor` as many as a node has GPUs or a divisor of that,
`pipeline` the number of nodes or a multiple. Where they are on several nodes, two sums a layer go over the
network, by NCCL, and never by the kernel for small sums; `FitsAccelerator` and `kubectl quire size --nodes`
then say so. How NCCL finds its way: [groups of nodes on GPUs](gpu.md#groups-of-nodes). *Not measured, and
never run on GPUs.*

Groups are made by [LeaderWorkerSet](https://lws.sigs.k8s.io) v0.9, which has to be installed; without it the
LLMDeployment says `MissingCRD`, and one node works as before. Where `nodes` is changed from one to more, or
back, what serves stays until all pods of its successor are ready; where there is no room for both, as long as
[a rollout waits for room](rollouts.md). What Quire adds to LeaderWorkerSet:

| | |
|---|---|
| requests | only leaders are in the Service; a group is ready with its last pod |
| a rank, a pod or a link fails | the whole group ends within seconds, and another one is made |
| rollout | groups are replaced in place, so two revisions never serve together |
| rollout, scale-down | the leader finishes its streams, and its workers end once it has |
| mixed revisions | pods of two revisions do not join (`MixedRevision`) |
| eviction | the PodDisruptionBudget counts workers too: the end of one ends its group |
| no place for some pods | after two minutes `GroupIncomplete`, with who waits and why |
| crash loop | five recreations in ten minutes are a `GroupCrashLoop`, and a growing delay |
| `status.groups` | phase, ready pods, recreations, last failure and slowest rank of each group |

The delay, before anything is loaded, begins with 10 seconds and is twice as long after each further
recreation, up to 640 seconds.

Before the pods of a group exchange anything, they prove to each other that they mount the same Secret, which
`authSecretRef` names, or else that of the API keys: HMAC-SHA256 over random numbers of both sides, on the
leader's port 7600. The operator never reads the Secret. Change it, and new pods take the new one. Without
either, `RanksAuthenticated` is False: the NetworkPolicy alone, by which the ports of a group are open to
its own pods only, keeps others away. It always has to for gloo and NCCL (port 7601 of the leader, and ports
that the kernel chooses), which have no authentication and no encryption.

## When a rank fails

The ranks of a model end together. The server ends its streams with an error and exits, and Kubernetes
restarts the container: within two seconds when a process was killed, within five when it is stopped or
does not take part in a step. A rank beats twice a second; after 2.5 s without a beat it is given up (10 s
while the model warms up), unless the whole pod was paused. The log, the termination message and `/statusz`
say which rank it was. `/statusz` of a group's leader lists the ranks of all its pods:

| entry of `ranks` in `/statusz` | |
|---|---|
| `rank` | its number; rank 0 schedules and samples |
| `stage`, `tensorRank` | its stage, and its number among those that share the layers |
| `host` | the pod in which it runs |
| `beatAge` | seconds since it ran last; null in another pod, which shows it |
| `lastStep` | the last step that rank 0 has sent, or that another rank has executed |
| `echoAge` | seconds since rank 0 heard that the rank has executed a step |
| `stepSeconds` | time to compute its last step, without waits for other ranks; on GPUs with them |
| `overdueSeconds` | for how long rank 0 has waited for its answer to a step; 0 where it waits for none |
| `missing` | empty, `NotStarted`, `NotLoaded` (in another pod), `Silent` (no beat), `NotEchoed`, `Killed` |

The LLMDeployment's status names the rank that is missing, behind, or more than twice as slow as the others,
with its pod and its step. Leaders of groups that serve are asked every ten seconds: a rank is then in
`status.groups[].slowestRank` once the median of its last five reported steps is more than 1.5 times that of
the others, and until it is below 1.25 times. `/metrics` has for each rank the time in which it computes, its
silence and its bytes ([metrics](observability.md#metrics)), and the dashboard a row of them. Ranks are
distinguished by what they run: one of another version, model, setting or revision is refused by rank 0, and
the server ends with the reason `MixedRevision`. Pods of other replicas go on.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, _sizes(), SIZES_TAIL, _ranks(), "\n## Bytes of a step\n\n", _steps(), STEP_TAIL]
    return "".join([*parts, _stages(), STAGES_TAIL, _sums(), SUMS_TAIL])


def sizes_of(model: ModelShape) -> list[int]:
    """The sizes that the API takes and that divide the model."""
    return [size for size in tensor_sizes(model) if size <= MOST]


def _sizes() -> str:
    lines = ["| model | heads | of keys and values | sizes that work |", "|---|---:|---:|---|"]
    for name, model in MODELS.items():
        sizes = ", ".join(map(str, sizes_of(model)))
        lines.append(f"| {name} | {model.num_heads} | {model.num_kv_heads} | {sizes} |")
    return "\n".join(lines) + "\n"


def _ranks() -> str:
    lines = [
        "| model | tensor | weights of a rank | of all ranks | its KV heads | a token in its cache |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        for size in sizes_of(model):
            weights = memory.weight_bytes(rank_parameters(model, size))
            lines.append(
                f"| {name} | {size} | {weights / GB:.2f} GB | {size * weights / GB:.2f} GB | "
                f"{rank_kv_heads(model, size)} | {memory.kv_bytes_per_token(model, 16, size):,} B |"
            )
    return "\n".join(lines) + "\n"


def _steps() -> str:
    lines = [
        "All ranks add up their parts twice in each layer, after the attention and after the feed-forward,",
        "and once for the embedding: 2 x layers + 1 sums, each of tokens x hidden size numbers, whatever the",
        "number of ranks. What each rank gives to them in 16 bits:",
        "",
        "| model | sums | one token | 64 tokens | 512 tokens |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        given = " | ".join(_mb(memory.exchanged_bytes(model, tokens)) for tokens in (1, 64, 512))
        lines.append(f"| {name} | {memory.exchanges(model.num_layers)} | {given} |")
    return "\n".join(lines) + "\n"


def stages_of(model: ModelShape, pipeline: int) -> list[int]:
    """The numbers of layers of each stage."""
    head = model.vocab_size * model.hidden_size
    layer = (model.parameters - model.vocab_parameters) // model.num_layers
    return [layers.size for layers in stage_layers([layer] * model.num_layers, head, pipeline)]


def _stages() -> str:
    lines = ["| model | layers | the head is as large as | 2 stages | 3 stages |", "|---|---:|---:|---|---|"]
    for name, model in MODELS.items():
        layer = (model.parameters - model.vocab_parameters) / model.num_layers
        heads = model.vocab_size * model.hidden_size / layer
        columns = [" + ".join(map(str, stages_of(model, size))) for size in (2, 3)]
        lines.append(f"| {name} | {model.num_layers} | {heads:.1f} layers | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _sums() -> str:
    lines = [
        "| model | on | for 2 devices | for 4 devices |",
        "|---|---|---:|---:|",
    ]
    for name, device, bandwidth in SUMS:
        model = MODELS[name]
        weights = memory.weight_bytes(model.parameters)
        times = [memory.longest_sum(model, devices, bandwidth, weights) * 1e6 for devices in (2, 4)]
        lines.append(f"| {name} | {device} | {times[0]:.0f} µs | {times[1]:.0f} µs |")
    return "\n".join(lines) + "\n"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
