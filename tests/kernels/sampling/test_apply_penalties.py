"""The reference equals the sampler's penalties on a CPU, row by row."""

import torch

from quire_kernels.sampling.apply_penalties import apply_penalties
from quire_server.core.sampling_params import SamplingParams
from quire_server.runner.logits_processors import adjust

SETTINGS = [
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, repetition_penalty=1.3),
    SamplingParams(max_tokens=1, presence_penalty=0.1, frequency_penalty=0.7),
    SamplingParams(max_tokens=1, repetition_penalty=0.9, presence_penalty=-1.7, frequency_penalty=1.1),
]


def test_penalties_are_bitwise_equal_to_the_cpu_sampler() -> None:
    torch.manual_seed(1)
    logits, tokens = torch.randn(8, 300) * 4, torch.randint(0, 90, (4, 200))
    rows, prompts, lengths = torch.arange(8) % 4, torch.arange(8) * 9, torch.arange(8) * 9 + 130
    chosen = [SETTINGS[row] for row in rows.tolist()]
    expected = logits.clone()
    for index, sampling in enumerate(chosen):
        context = tokens[rows[index], : int(lengths[index])].numpy()
        adjust(expected[index], context, int(prompts[index]), sampling, None)
    given = apply_penalties(
        logits, tokens, rows, prompts, lengths,
        torch.tensor([each.repetition_penalty for each in chosen]),
        torch.tensor([each.presence_penalty for each in chosen], dtype=torch.float64),
        torch.tensor([each.frequency_penalty for each in chosen], dtype=torch.float64),
    )  # fmt: skip
    assert torch.equal(given, expected) and not torch.equal(given, logits)
