"""The CRDs of what the gateway reads as the API server takes them."""

from __future__ import annotations

import pytest

from e2e.api import gateway_kinds, specs
from e2e.api.client import Client, RefusedError
from quire_operator.plan import lost_fields

pytestmark = [pytest.mark.api, pytest.mark.timeout(120)]


@pytest.mark.parametrize("body", gateway_kinds.EVERY, ids=specs.name_of)
def test_an_object_with_every_field_is_accepted_whole(api: Client, body: specs.Body) -> None:
    assert lost_fields(body, api.try_create(body)) == []


@pytest.mark.parametrize("body", gateway_kinds.LEAST, ids=specs.name_of)
def test_the_least_that_an_object_says_is_accepted_and_starts_unobserved(
    api: Client, body: specs.Body
) -> None:
    assert api.try_create(body)["status"] == {"observedGeneration": -1}


def test_every_rule_accepts_and_refuses_what_it_should(api: Client) -> None:
    assert set(gateway_kinds.rules()) == set(gateway_kinds.CASES)
    for rule, (accepted, refused) in gateway_kinds.CASES.items():
        for body in accepted:
            api.try_create(body)
        field = rule.rpartition(" ")[2].partition("#")[0].replace("[]", "[0]")
        for body in refused:
            with pytest.raises(RefusedError) as refusal:
                api.try_create(body)
            assert field in str(refusal.value)


@pytest.mark.parametrize("number", range(len(gateway_kinds.REFUSED)))
def test_what_no_gateway_could_use_is_refused(api: Client, number: int) -> None:
    with pytest.raises(RefusedError):
        api.try_create(gateway_kinds.REFUSED[number])
