"""Kubernetes quantities (500m, 2, 1.5Gi) as exact numbers, and spelt as the API server keeps them.

The spec reader checks with it: a manifest that spelt a quantity in another way than the API server would look
changed in every comparison of desired and live. Knows no field and no resource.
"""

from __future__ import annotations

import re
from fractions import Fraction

from quire_operator.errors import QuantityError

# No exponents (1e3) and nothing below a milli-unit: what people write, and all that we need to read.
PATTERN = r"^([0-9]{1,18}m|[0-9]{1,18}(\.[0-9]{1,3})?(k|M|G|T|Ki|Mi|Gi|Ti)?)$"

_PARTS = re.compile(r"(?P<number>[0-9.]+)(?P<suffix>[A-Za-z]*)")
_DECIMAL = {"m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6)}
_DECIMAL |= {"G": Fraction(10**9), "T": Fraction(10**12)}
_BINARY = {"Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40)}


def parse(text: str) -> Fraction:
    """The exact value: parse("1.5Gi") == 1610612736."""
    number, suffix = _split(text)
    return number * (_BINARY | _DECIMAL)[suffix]


def canonical(text: str) -> str:
    """As the API server stores it: the largest suffix of the same family that leaves a whole number."""
    value = parse(text)
    _, suffix = _split(text)
    whole_binary = suffix in _BINARY and value >= 1024 and value.denominator == 1
    units = {"": Fraction(1)} | _BINARY if whole_binary else _DECIMAL
    for unit, size in sorted(units.items(), key=lambda item: item[1], reverse=True):
        if (value / size).denominator == 1 and value:
            return f"{value // size}{unit}"
    return "0"


def whole_bytes(text: str) -> int:
    """The value rounded up to a whole number, for programs that take plain bytes."""
    return -int(-parse(text) // 1)


def _split(text: str) -> tuple[Fraction, str]:
    parts = _PARTS.fullmatch(text) if re.match(PATTERN, text) else None
    if parts is None:
        raise QuantityError(f"{text!r} is not a quantity: write for example 500m, 2 or 4Gi")
    return Fraction(parts["number"]), parts["suffix"]
