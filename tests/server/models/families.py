"""Small random models of every variant, made by transformers, and transformers' answers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.server.models import matrix
from tests.server.models.variants import SIZES, VARIANTS, VOCAB
from tests.server.runner.in_process import InProcessEngine, greedy, load

_rng = random.Random(11)
PROMPTS = [_rng.choices(range(2, VOCAB), k=length) for length in (45, 46, 44)]
# Several conditions in one run: three requests that together exceed the memory.
HARD = matrix.settings(
    {
        "chunk": "chunks of 7",
        "prefix": "prefix miss",
        "preemption": "preemption, swapped",
        "batch": "3 requests",
        "speculation": "no drafts",
    }
)


def config(prefix: str, settings: dict[str, Any]) -> transformers.PretrainedConfig:
    """transformers' configuration."""
    kind = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    return kind(**(SIZES | settings))


def build(directory: Path, prefix: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """Write the model to the directory and return it."""
    torch.manual_seed(7)
    kind = getattr(transformers, f"{prefix}ForCausalLM")
    # Only eager attention applies the soft caps.
    model = kind._from_config(config(prefix, settings), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" in name and "Gemma" in prefix:
                parameter.mul_(0.1)  # Gemma scales embeddings up, which would hide the layers' contributions
            elif "gate.weight" in name or "experts" in name:
                parameter.normal_(0, 0.25)
    model.save_pretrained(directory)
    return model


def make(directory: Path, variant: str) -> transformers.PreTrainedModel:
    """One of the variants of the parity matrix."""
    return build(directory, *VARIANTS[variant])


@torch.inference_mode()
def answers(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], length: int
) -> list[list[int]]:
    """Greedy, one prompt at a time."""
    results = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        results.append(output[0, ids.shape[1] :].tolist())
    return results


def assert_same(directory: Path, model: transformers.PreTrainedModel, **options: object) -> None:
    """Each token that we produce is the likeliest one of transformers for the same context, and likewise the
    log-probabilities.
    """
    engine = InProcessEngine(load(directory, kv_offload_host_bytes=4 << 20, **options), **HARD)
    answers = engine.generate(PROMPTS, greedy(20, logprobs=VOCAB))
    assert engine.scheduler.kv.stats().swaps > 0
    assert len({token for answer in answers for token in answer}) > 10, "too uniform to prove anything"
    for name, prompt, answer in zip(engine.logprobs, PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist()
        ours = [[value for _, value in sorted(entry.top)] for entry in engine.logprobs[name]]
        expected = torch.log_softmax(logits.float(), dim=-1)
        torch.testing.assert_close(torch.tensor(ours), expected, atol=1e-4, rtol=0)
