"""docs/pools.md: three LLMDeployments of one model by kind of work, with the numbers of quire_sizing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from docs.parallelism_tables import MODELS
from quire_sizing import memory
from quire_sizing.memory import Accelerator, Serving, Verdict

GB = 10**9
MODEL = "Llama 3.1 8B"
SHAPE = replace(MODELS[MODEL], longest=131072)
CARD = Accelerator(memory=80 * GB, bandwidth=3350 * GB)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """An LLMDeployment of the page. `most`: requests at once, None for as many as fit at their longest."""

    name: str
    max_model_len: int
    max_num_batched_tokens: int
    most: int | None = None

    @property
    def max_num_seqs(self) -> int:
        """What the manifest says."""
        return self.most or fitting(self.max_model_len, self.max_num_batched_tokens)


POOLS = (
    Pool(name="chat-interactive", max_model_len=8192, max_num_batched_tokens=512, most=32),
    Pool(name="chat-batch", max_model_len=4096, max_num_batched_tokens=8192),
    Pool(name="chat-long", max_model_len=131072, max_num_batched_tokens=2048),
)


def fitting(max_model_len: int, max_num_batched_tokens: int) -> int:
    """The most requests of that length at once."""
    count = 0
    while budget(max_model_len, max_num_batched_tokens, count + 1).verdict is Verdict.FITS:
        count += 1
    return count


def budget(max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int) -> memory.Budget:
    """On the card of the page."""
    serving = Serving(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return memory.budget(SHAPE, CARD, serving)


HEAD = """# Pools for interactive, batch and long work

One LLMDeployment has one batch. The users of a chat, a job with a thousand prompts and a question
about a whole book share its steps and its KV cache there: a step takes as long as all that is in it,
and one long context takes the memory of dozens of short ones. Several LLMDeployments of the same model,
each for one kind of work, keep them apart, and an [LLMRoute](gateway-routes.md) divides the requests.
Clients know one name.
"""

ROUTE = """## The route

```yaml
apiVersion: serving.quire.dev/v1alpha1
kind: LLMRoute
metadata: {name: chat}
spec:
  models: [chat]
  rules:
    - match: {headers: {x-work: batch}, maxPromptTokens: 3000}
      targets: [{deployment: chat-batch}]
    - match: {maxPromptTokens: 6000}
      targets: [{deployment: chat-interactive}]
    - targets: [{deployment: chat-long}]
```

The first rule that matches decides. Jobs send the header `x-work: batch`; without it, or with a longer
prompt, they are like all others. The gateway estimates prompts (bytes of their text divided by four),
so the limits are about three quarters of each `maxModelLen`: the rest is for the answer and for what
the estimate misses. A prompt that is too long for its pool all the same is refused by its replica with
400.
"""

TAIL = """## What it is good for

- **A step is as long as what is in it.** Prompts are computed in chunks beside the decoding requests
  ([how](scheduling.md)). `--max-num-batched-tokens` bounds a step: 512 keep the pause between two
  tokens of a chat short, 8,192 use the accelerator better and make its steps about sixteen times as
  long while prompts wait. A prompt of 100,000 tokens takes {long_steps} steps of the long pool, in each
  of which every other answer there gets one token.
- **One long context takes the room of {ratio} interactive ones**: {long_kv} of KV cache beside
  {short_kv}. In one deployment, a few of them would make the others wait or be computed again.
- **Each is scaled by itself**: interactive by the queue, with a replica to spare; batch with
  `minReplicas: 0` ([how](autoscaling.md#scaling-to-zero)) or on spot nodes; long with as few replicas
  as its users accept.

## When not

- With one accelerator. Priorities (`priority` of a request, and of a [key](gateway-routes.md)) order
  the work in one batch, or the deployments [take
  turns](autoscaling.md#several-models-on-one-accelerator).
- With little traffic: each pool has the weights of its own, {weights} here, and three half-empty
  batches read them three times where one full batch reads them once.
- Where prompts have long beginnings in common and differ in kind of work: each pool has its own prefix
  cache.
- If only long prompts disturb: [prefill pods](disaggregation.md) take them off the same deployment.

How much a long prompt delays others on a GPU was not measured for this page; the numbers above are of
memory, and of steps.
"""


def page() -> str:
    """The whole page."""
    tables = []
    for pool in POOLS:
        found = budget(pool.max_model_len, pool.max_num_batched_tokens, pool.max_num_seqs)
        room = found.usable - found.weights - found.workspace
        tables.append(
            f"| `{pool.name}` | {pool.max_model_len:,} | {_gb(found.kv_per_token * pool.max_model_len, 2)} "
            f"| {pool.max_num_seqs} | {_gb(found.kv_wanted)} of {_gb(room)} |"
        )
    first = budget(POOLS[0].max_model_len, POOLS[0].max_num_batched_tokens, 1)
    each = first.kv_per_token
    long, short = POOLS[2].max_model_len * each, POOLS[0].max_model_len * each
    numbers = f"""## The numbers

{MODEL} in 16 bits on one accelerator of 80 GB, of which 90 % are used: {_gb(first.usable)}.
The weights take {_gb(first.weights)}, a step one or two, and the KV cache has the rest. A token takes
2 x {SHAPE.num_layers} layers x {SHAPE.num_kv_heads} KV heads x {SHAPE.head_size} numbers x 2 bytes
= {each:,} B, a request that times its longest context:

| pool | `maxModelLen` | KV cache of one request | `maxNumSeqs` | of all of them |
|---|---:|---:|---:|---:|
"""
    tail = TAIL.format(
        long_steps=-(-100_000 // POOLS[2].max_num_batched_tokens),
        ratio=long // short,
        long_kv=_gb(long),
        short_kv=_gb(short),
        weights=_gb(first.weights),
    )
    fits = fitting(POOLS[0].max_model_len, POOLS[0].max_num_batched_tokens)
    note = f"""
Batch and long have as many requests at once as fit if each is as long as it may be. Interactive has
fewer than the {fits} that fit: more requests in a step make every one of them slower, and what is
left is prefix cache.
`kubectl quire size MODEL --memory 80GB --max-model-len 8192 --max-num-seqs 32` has the same arithmetic
for your model ([how](sizing.md)).

## The deployments

"""
    manifests = "\n".join(f"```yaml\n{_manifest(pool)}```\n" for pool in POOLS)
    return "\n".join([HEAD, numbers + "\n".join(tables) + "\n" + note + manifests, ROUTE, tail])


def _manifest(pool: Pool) -> str:
    return f"""apiVersion: serving.quire.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: {pool.name}}}
spec:
  model: {{source: {{pvc: {{claimName: models, path: llama-3.1-8b}}}}}}
  resources: {{cpu: "8", memory: 96Gi, gpu: {{}}}}
  engine:
    maxModelLen: {pool.max_model_len}
    maxNumSeqs: {pool.max_num_seqs}
    extraArgs: ["--max-num-batched-tokens={pool.max_num_batched_tokens}"]
"""


def _gb(count: int, digits: int = 1) -> str:
    return f"{count / GB:.{digits}f} GB"
