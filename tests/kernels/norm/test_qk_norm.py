import torch

from quire_kernels.norm.qk_norm import qk_norm, qk_norm_reference

HEADS, KV_HEADS, SIZE = 6, 2, 8


def test_it_equals_its_reference_and_leaves_the_values_alone() -> None:
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * SIZE)
    weights = torch.randn(SIZE), torch.randn(SIZE)
    ours, theirs = qkv.clone(), qkv.clone()
    qk_norm(ours, *weights, 1e-5, KV_HEADS)
    qk_norm_reference(theirs, *weights, 1e-5, KV_HEADS)
    torch.testing.assert_close(ours, theirs)
    values = KV_HEADS * SIZE
    assert torch.equal(ours[:, -values:], qkv[:, -values:])
    for head in ours[:, :-values].view(5, -1, SIZE)[:, :HEADS].flatten(0, 1):
        torch.testing.assert_close((head / weights[0]).pow(2).mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
