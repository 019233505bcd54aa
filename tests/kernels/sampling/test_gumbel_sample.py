import torch

from quire_kernels.sampling.gumbel_sample import gumbel_noise, gumbel_sample, philox


def test_philox_gives_the_published_vectors() -> None:
    """Random123's known answers for philox4x32-10 that this counter layout can express."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = philox(zero, zero, zero)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    count = 20_000
    drawn = gumbel_sample(
        logits.expand(count, -1),
        torch.full((count,), 0.7),
        torch.full((count,), 5),
        torch.arange(count),
    )
    expected = torch.softmax(logits[0] / 0.7, dim=-1) * count
    chi_square = ((drawn.bincount(minlength=5) - expected).square() / expected).sum()
    assert chi_square < 23.5  # 4 degrees of freedom: one in ten thousand, and the seed is fixed


def test_a_sample_depends_only_on_seed_and_position() -> None:
    logits = torch.randn(6, 1000)
    temperature = torch.full((6,), 1.3)
    seeds, positions = torch.tensor([1, -7, 3, 3, 1 << 62, 0]), torch.tensor([0, 5, 9, 10, 7, 1 << 33])
    together = gumbel_sample(logits, temperature, seeds, positions)
    alone = [
        gumbel_sample(logits[i : i + 1], temperature[:1], seeds[i : i + 1], positions[i : i + 1])
        for i in range(6)
    ]
    assert torch.equal(together, torch.cat(alone))
    noise = gumbel_noise(seeds, positions, 1000)
    assert len({tuple(row[:4].tolist()) for row in noise}) == 6
    assert torch.equal(noise[:, :37], gumbel_noise(seeds, positions, 37))


def test_no_token_below_the_threshold_is_sampled() -> None:
    logits = torch.randn(1, 50).expand(500, -1)
    threshold = logits[0].topk(3).values[-1] / 2.0
    drawn = gumbel_sample(
        logits, torch.full((500,), 2.0), torch.arange(500), torch.zeros(500).long(),
        threshold=threshold.expand(500),
    )  # fmt: skip
    assert set(drawn.tolist()) == set(logits[0].topk(3).indices.tolist())
