import torch

from quire_kernels.sampling.token_logprobs import token_logprobs


def test_it_returns_the_sampled_and_the_most_likely_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0]])
    chosen, top, ids = token_logprobs(logits, torch.tensor([0, 2]), 2)
    expected = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(chosen, torch.stack((expected[0, 0], expected[1, 2])))
    assert ids[0].tolist() == [1, 2] and set(ids[1].tolist()) == {0, 1}
    torch.testing.assert_close(top[0], expected[0, [1, 2]])
    assert token_logprobs(logits, torch.tensor([0, 2]), 0)[1].shape == (2, 0)
