import pytest
import torch

from quire_kernels.sampling.topk_topp_threshold import topk_topp_threshold, topk_topp_threshold_reference

SETTINGS = [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.9), (0, 0.01), (50, 0.5), (1500, 1.0), (0, 0.999)]


def kept(scaled: torch.Tensor, top_k: int, top_p: float) -> int:
    """By the definition, one token at a time; tokens equal to the last one that is kept are kept too."""
    order = scaled.sort(descending=True).values
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        probabilities = torch.softmax(order.double(), dim=-1)
        order = order[: int((probabilities.cumsum(0) - probabilities < top_p).sum())]
    return int((scaled >= order[-1]).sum())


@pytest.mark.parametrize("vocab_size", [60, 3000])
@pytest.mark.parametrize("spread", [0.1, 3.0])  # a flat distribution needs more candidates than a steep one
def test_the_number_of_kept_tokens_follows_the_definition(vocab_size: int, spread: float) -> None:
    scaled = torch.randn(len(SETTINGS), vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    top_k = torch.tensor([min(k, vocab_size) for k, _ in SETTINGS])
    top_p = torch.tensor([p for _, p in SETTINGS])
    thresholds = topk_topp_threshold(scaled, top_k, top_p)
    counts = (scaled >= thresholds[:, None]).sum(dim=-1)
    expected = [kept(scaled[i], int(top_k[i]), p) for i, (_, p) in enumerate(SETTINGS)]
    # Over thousands of nearly equal tokens, float32 may shift the threshold by one token.
    assert all(abs(a - b) <= b // 500 for a, b in zip(counts.tolist(), expected, strict=True)), expected
    torch.testing.assert_close(thresholds, topk_topp_threshold_reference(scaled, top_k, top_p))


def test_ties_at_the_cut_are_all_kept() -> None:
    scaled = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    threshold = topk_topp_threshold(scaled, torch.tensor([2]), torch.tensor([1.0]))
    assert int((scaled >= threshold).sum()) == 3
