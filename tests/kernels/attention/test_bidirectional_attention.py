import pytest
import torch

from quire_kernels import bidirectional_attention
from quire_kernels.attention.bidirectional_attention import bidirectional_attention_reference

LENGTHS = {"one": [7], "equal neighbours": [3, 3, 3], "a mixture": [1, 9, 9, 2, 30], "none": []}


def packed(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn(sum(lengths), 3, 4, 16).to(dtype)
    return (*qkv.unbind(1), torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_it_equals_its_reference(lengths: list[int], dtype: torch.dtype) -> None:
    q, k, v, bounds = packed(lengths, dtype)
    result = bidirectional_attention(q, k, v, bounds, lengths, 0.3)
    expected = bidirectional_attention_reference(q, k, v, bounds, 0.3)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(result, expected, **tolerance)


def test_a_text_sees_all_of_itself_and_nothing_of_the_others() -> None:
    q, k, v, bounds = packed([4, 3])
    before = bidirectional_attention(q, k, v, bounds, [4, 3], 0.3)
    v[3] += 1  # the last token of the first text
    after = bidirectional_attention(q, k, v, bounds, [4, 3], 0.3)
    assert (before[:4] != after[:4]).any(-1).all() and torch.equal(before[4:], after[4:])
