"""The committed table of machine code is current, and shows no spills and no missing vector accesses."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import triton
import triton.language as tl

from bench import aot
from quire_kernels.launch_config import LaunchConfig

REMEDY = "run `python -m bench.aot` and commit bench/results/aot.json"


def test_the_table_has_every_launch_config_with_its_current_source() -> None:
    table, wanted = aot.table(), aot.wanted()
    assert table.keys() == wanted.keys(), REMEDY
    stale = [key for key, each in wanted.items() if table[key].source != aot.source_of(each, key[1])]
    assert stale == [], REMEDY


def test_nothing_spills_and_everything_fits() -> None:
    wanted = aot.wanted()
    assert [text for key, row in aot.table().items() for text in aot.faults(row, wanted[key])] == []


@pytest.mark.kernels
@pytest.mark.parametrize("name", sorted({name for name, _ in aot.wanted()}))
def test_the_table_is_what_the_compiler_gives(name: str) -> None:
    gives = {key: aot.compiled(each, key[1]) for key, each in aot.wanted().items() if key[0] == name}
    assert gives == {key: row for key, row in aot.table().items() if key[0] == name}, REMEDY


@triton.jit
def _helper(x):
    return x * 2


@triton.jit
def _greedy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, tl.sort(x), mask=at < n)


@pytest.fixture
def greedy() -> Iterator[LaunchConfig]:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    return LaunchConfig("greedy", _greedy, types, {"BLOCK": 16384}, warps=1, gpus=(90,))


def test_spills_and_regressions_are_reported(greedy: LaunchConfig) -> None:
    row = aot.compiled(replace(greedy, constants={"BLOCK": 512}, registers=24, expects=("mma",)), 90)
    assert row.spills > 0 and row.registers <= 24
    assert any("spill" in text for text in aot.faults(row, greedy))
    assert any("no mma" in text for text in aot.faults(row, replace(greedy, expects=("mma",))))
    better = replace(row, registers=row.registers - 1, spills=0)
    assert len(aot.worse(row, better)) == 2 and aot.worse(better, row) == []


def test_the_hash_is_of_what_is_compiled(greedy: LaunchConfig) -> None:
    now = aot.source_of(greedy, 90)
    changed = [
        replace(greedy, warps=2),
        replace(greedy, constants={"BLOCK": 2048}),
        replace(greedy, kernel=_helper),
    ]
    assert now == aot.source_of(replace(greedy, expects=("mma",)), 90)
    assert len({now, aot.source_of(greedy, 80), *(aot.source_of(each, 90) for each in changed)}) == 5


def test_an_argument_without_a_type_is_named(greedy: LaunchConfig) -> None:
    with pytest.raises(ValueError, match=r"greedy: .*'n'"):
        aot.compiled(replace(greedy, types={"x_ptr": "*fp32", "y_ptr": "*fp32"}), 90)
