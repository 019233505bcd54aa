"""quire_operator.quantity: exact values, in the canonical form of the API server."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator import quantity
from quire_operator.errors import QuantityError

# Left as written, right as a kube-apiserver 1.34 stores it.
SPELLINGS = [
    ("1", "1"),
    ("1000m", "1"),
    ("0.5", "500m"),
    ("1.50", "1500m"),
    ("1k", "1k"),
    ("1000", "1k"),
    ("1024Mi", "1Gi"),
    ("1.5Gi", "1536Mi"),
    ("2147483648", "2147483648"),
    ("1Ki", "1Ki"),
    ("0.5Ki", "512"),
    ("0.001Gi", "1073741824m"),
    ("100.1M", "100100k"),
    ("007", "7"),
    ("0", "0"),
    ("0Gi", "0"),
]


@pytest.mark.parametrize(("written", "stored"), SPELLINGS)
def test_a_quantity_gets_the_canonical_form_of_the_api_server(written: str, stored: str) -> None:
    assert quantity.canonical(written) == stored


@given(st.from_regex(quantity.PATTERN, fullmatch=True))
def test_the_canonical_form_keeps_the_value_and_is_idempotent(text: str) -> None:
    canonical = quantity.canonical(text)
    try:
        assert quantity.parse(canonical) == quantity.parse(text)
        assert quantity.canonical(canonical) == canonical
    except QuantityError:
        assert quantity.parse(text) >= 10**15  # longer than what we read: no one has that much memory


@pytest.mark.parametrize(
    "text", ["", "1e3", "-1", "+1", "1 Gi", "Gi", "1.0000", "1gi", "1\n", "٣", "0x10", "1.5m"]
)
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(QuantityError):
        quantity.parse(text)


def test_fractional_bytes_are_rounded_up() -> None:
    assert quantity.parse("1.5Ki") == Fraction(1536)
    assert quantity.whole_bytes("1.5Ki") == 1536
    assert quantity.whole_bytes("1500m") == 2
