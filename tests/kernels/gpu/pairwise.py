"""Pairwise testing: few cases in which every pair of values occurs, since most faults need no more."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Chosen = tuple[str, int]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases in which every pair of values of two factors occurs; deterministic."""
    uncovered = {
        ((one, i), (other, j))
        for one, other in combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    }
    cases = []
    while uncovered:
        case = dict(min(uncovered))
        for name in factors:
            if name not in case:
                case[name] = max(
                    range(len(factors[name])),
                    key=lambda i: len(_pairs({**case, name: i}, factors) & uncovered),
                )
        uncovered -= _pairs(case, factors)
        cases.append({name: values[case[name]] for name, values in factors.items()})
    return cases


def _pairs(case: Mapping[str, int], factors: Mapping[str, Any]) -> set[tuple[Chosen, Chosen]]:
    return set(combinations(((name, case[name]) for name in factors if name in case), 2))


def cases(factors: Mapping[str, Sequence[Any]]) -> list[Any]:
    """For parametrize: the quick form has every value once; other cases are marked ``kernels``."""
    seen: set[str] = set()
    parameters = []
    for case in pairwise(factors):
        values = {f"{name} {value}" for name, value in case.items()}
        parameters.append(pytest.param(case, marks=() if values - seen else pytest.mark.kernels))
        seen |= values
    return parameters
