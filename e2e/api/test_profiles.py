"""The CRD of AcceleratorProfiles as the API server takes it, and the profiles that the chart ships."""

from __future__ import annotations

import pytest

from e2e.api import profiles, specs
from e2e.api.client import Client, RefusedError
from quire_operator.plan import lost_fields

pytestmark = [pytest.mark.api, pytest.mark.timeout(120)]


@pytest.mark.parametrize("body", [profiles.FULL, *profiles.SHIPPED], ids=specs.name_of)
def test_a_profile_is_accepted_whole(api: Client, body: specs.Body) -> None:
    assert lost_fields(body, api.try_create(body)) == []


def test_every_rule_accepts_and_refuses_what_it_should(api: Client) -> None:
    assert set(profiles.rules()) == set(profiles.CASES)
    for rule, (accepted, refused) in profiles.CASES.items():
        for body in accepted:
            api.try_create(body)
        field = rule.partition("#")[0].replace("[]", "[0]")
        for body in refused:
            with pytest.raises(RefusedError) as refusal:
                api.try_create(body)
            assert field in str(refusal.value)
