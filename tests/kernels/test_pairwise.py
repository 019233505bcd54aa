from itertools import combinations, product

from tests.kernels.gpu.pairwise import cases, pairwise

FACTORS = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0.5, 1.5, 2.5, 3.5]}


def test_every_pair_of_values_occurs_in_few_cases() -> None:
    found = pairwise(FACTORS)
    for one, other in combinations(FACTORS, 2):
        met = {(case[one], case[other]) for case in found}
        assert met == set(product(FACTORS[one], FACTORS[other]))
    assert len(found) <= 16 < len(list(product(*FACTORS.values())))
    assert found == pairwise(FACTORS)


def test_the_quick_form_has_every_value() -> None:
    quick = [each.values[0] for each in cases(FACTORS) if not each.marks]
    assert all({case[name] for case in quick} == set(values) for name, values in FACTORS.items())
    assert len(quick) < len(cases(FACTORS))
