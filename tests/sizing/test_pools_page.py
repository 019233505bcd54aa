"""The manifests of docs/pools.md are valid and fit, its figures are those of the sizing, and its route
divides the requests as the page says.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from docs import pool_tables
from e2e.api import gateway_kinds, specs
from quire_gateway import llm_route
from quire_operator import resources, spec
from quire_operator.resources import scaling_behavior
from quire_operator.settings import Settings
from quire_sizing.memory import Verdict

PAGE = pool_tables.page()
BODIES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]
*DEPLOYMENTS, ROUTE = BODIES
STORED = specs.merged(
    ROUTE, {"metadata": {"namespace": "ns", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
)


@pytest.mark.parametrize("body", DEPLOYMENTS, ids=lambda body: str(body["metadata"]["name"]))
def test_a_manifest_of_the_page_is_valid_renders_and_fits_its_accelerator(body: dict[str, Any]) -> None:
    Draft202012Validator(specs.SCHEMA).validate(body)
    model = spec.parse(body)
    assert "Deployment" in [one["kind"] for one in resources.build(model, Settings(engine_image="x:1"))]
    engine = model.spec.engine
    (tokens,) = [one.partition("=")[2] for one in engine.extra_args]
    assert engine.max_model_len is not None
    found = pool_tables.budget(
        engine.max_model_len, int(tokens), engine.max_num_seqs or scaling_behavior.DEFAULT_BATCH
    )
    assert found.verdict is Verdict.FITS
    one_more = pool_tables.budget(engine.max_model_len, int(tokens), (engine.max_num_seqs or 0) + 1)
    assert (one_more.verdict is Verdict.FITS) is (model.name == "chat-interactive"), "the others use it all"


def rule_of(tokens: int, **headers: str) -> str:
    """The LLMDeployment that gets a prompt of that length."""
    for rule in llm_route.parse(STORED).rules:
        limit = rule.match.max_prompt_tokens
        given = dict(rule.match.headers)
        if (limit is None or tokens <= limit) and given.items() <= headers.items():
            (target,) = rule.targets
            return target.deployment
    raise AssertionError("no rule matches")


def test_the_route_of_the_page_is_valid_and_divides_the_requests() -> None:
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in gateway_kinds.CRDS["llmroutes"]["spec"]["versions"]
    ]
    Draft202012Validator(schema).validate(ROUTE)
    names = [body["metadata"]["name"] for body in DEPLOYMENTS]
    batch = {"x-work": "batch"}
    found = [rule_of(100), rule_of(100, **batch), rule_of(50_000), rule_of(50_000, **batch)]
    assert found == ["chat-interactive", "chat-batch", "chat-long", "chat-long"]
    assert set(found) == set(names)


def test_a_prompt_that_a_rule_lets_through_leaves_room_for_an_answer() -> None:
    longest = {body["metadata"]["name"]: body["spec"]["engine"]["maxModelLen"] for body in DEPLOYMENTS}
    for rule in llm_route.parse(STORED).rules[:-1]:
        (target,) = rule.targets
        assert (rule.match.max_prompt_tokens or 0) <= 0.75 * longest[target.deployment]


def test_the_figures_of_the_page_follow_from_the_formula() -> None:
    per_token = 2 * 32 * 8 * 128 * 2
    assert f"{per_token:,} B" in PAGE
    for body in DEPLOYMENTS:
        length, most = body["spec"]["engine"]["maxModelLen"], body["spec"]["engine"]["maxNumSeqs"]
        row = f"| `{body['metadata']['name']}` | {length:,} | {per_token * length / 1e9:.2f} GB | {most} "
        assert f"{row}| {per_token * length * most / 1e9:.1f} GB of " in PAGE
