"""The split kernel gives what one sequence at a time in float32 gives, whatever lies around the tokens."""

from typing import Any

import pytest
import torch

from quire_kernels import split_kv_attention_triton
from quire_kernels.gpu_type import capability
from quire_kernels.paged_decode_attention import paged_decode_attention_reference
from quire_kernels.paged_decode_attention_triton import paged_decode_attention_triton
from quire_kernels.split_kv_attention_triton import decode_splits
from tests.kernels.gpu.caches import CACHES, DTYPES, bound_of, paged, rows
from tests.kernels.gpu.closeness import assert_near
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.places import is_kept, place_for

FACTORS: dict[str, Any] = {
    "lengths": [[1], [5, 257, 0, 1], [123, 64], [16, 33, 100]],  # padding has none
    "kv_heads": [1, 2],
    "group": [4, 3, 1, 8, 24],
    "size": [64, 80, 96, 128, 256],
    "block": [16, 64],
    "dtype": DTYPES,
    "cache": CACHES,
    "splits": [1, 2, 8, 32],
    "tile": [32, 16, 64],
    "more": [{}, {"window": 1}, {"window": 70}, {"softcap": 2.0}, {"window": 17, "softcap": 1.0}],
    "is_full": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    dtype, cache, heads = case["dtype"], case["cache"], case["kv_heads"] * case["group"]
    lengths, kv_heads, size, block = (case[name] for name in ("lengths", "kv_heads", "size", "block"))
    keys, values, table, seq_lens, scales = paged(
        lengths, kv_heads, size, block, cache or dtype, device, is_full=case["is_full"]
    )
    q = rows(len(lengths), heads, size, dtype, device)
    whole, out = place_for(q, -2)
    arguments = (q, keys, values, table, seq_lens, size**-0.5)
    expected = paged_decode_attention_reference(*arguments, **case["more"], scales=scales)
    given = paged_decode_attention_triton(
        *arguments, **case["more"], scales=scales, splits=case["splits"], tile=case["tile"], out=out
    )
    assert given is out and is_kept(whole, -2)
    assert_near(out, expected, **bound_of(dtype, cache))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_number_that_is_none_is_not_hidden_and_stays_in_its_sequence(splits: int, device: str) -> None:
    keys, values, table, seq_lens, _ = paged([40, 40], 1, 64, 16, torch.float32, device)
    keys[table[0, 1], 0, 3, 5] = float("nan")
    q = torch.randn(2, 2, 64, device=device)
    given = paged_decode_attention_triton(q, keys, values, table, seq_lens, 0.1, splits=splits, tile=16)
    assert given[0].isnan().all() and given[1].isfinite().all()


def test_parts_fill_the_gpu_and_are_never_more_than_tiles() -> None:
    assert [decode_splits(batch, 8, 1 << 20, 264, 64) for batch in (1, 2, 4, 8, 32, 256)] == [
        32,
        16,
        8,
        4,
        1,
        1,
    ]
    assert decode_splits(1, 8, 100, 264, 64) == 2 and decode_splits(0, 8, 0, 264, 64) == 1


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    keys, values, table, seq_lens, _ = paged([5], 2, 64, 16, torch.float32, device)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode_attention_triton(
            torch.randn(1, 3, 64, device=device), keys, values, table, seq_lens, 1.0
        )
    with pytest.raises(ValueError, match="power of two up to 32: 3"):
        paged_decode_attention_triton(
            torch.randn(1, 4, 64, device=device), keys, values, table, seq_lens, 1.0, splits=3
        )


def test_what_the_tuning_found_is_what_is_launched(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    seen: list[tuple[int, int]] = []

    def noted(sequences: int, groups: int, longest: int, places: int, tile: int) -> int:
        seen.append((places, tile))
        return 1

    keys, values, table, lengths, _ = paged([20, 7], 1, 64, 16, torch.float32, device)
    q = torch.randn(2, 2, 64, device=device)
    arguments = (q, keys, values, table, lengths, 0.1)
    expected = paged_decode_attention_reference(*arguments)
    monkeypatch.setattr(split_kv_attention_triton, "decode_splits", noted)
    for table_of_tuning in ({}, {(capability(q.device), 2, 64, "float32"): (32, 2, 2, 5)}):
        monkeypatch.setattr(split_kv_attention_triton, "DECODE", table_of_tuning)
        assert_near(paged_decode_attention_triton(*arguments), expected)
    paged_decode_attention_triton(*arguments, tile=16)
    (own, own_tile), (tuned, tile), (asked, asked_tile) = seen
    assert tuned * 2 == own * 5 and asked == tuned
    assert (own_tile, tile, asked_tile) == (64, 32, 16)
