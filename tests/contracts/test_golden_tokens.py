"""What a server says of its canary is kept by the operator in a form that other servers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.operator import pods as kubelet
from quire_operator import names, reports
from quire_operator.observed import Observed, Ref
from quire_operator.reports import MAX_CANARY_TOKENS, MAX_GOLDEN_TOKENS, MAX_TOKEN_ID
from quire_server.engine.golden_tokens import Golden, GoldenTokens
from quire_server.health import engine_report
from tests.operator.plan.planning import plan_of
from tests.operator.status.objects import model_body, pod

LONGEST_NAME = "p" * 253


@pytest.mark.parametrize(
    ("replicas", "tokens"), [(1, [5, 6, 7]), (MAX_GOLDEN_TOKENS, [MAX_TOKEN_ID - 1] * MAX_CANARY_TOKENS)]
)
def test_tokens_go_from_one_server_through_the_operator_to_another(
    replicas: int, tokens: list[int], tmp_path: Path
) -> None:
    stored: dict[str, object] = {}
    for number in range(replicas):
        engine_report.write_canary(tmp_path, f"{number:064x}", tokens)
        said = json.dumps({"phase": "serving", "canary": engine_report.read_canary(tmp_path)}).encode()
        sample = reports.parse_statusz(said)
        assert sample is not None and sample.canary is not None
        reported = kubelet.ready()
        observed = Observed(
            body=model_body(),
            pods=(pod(reported, name=LONGEST_NAME),),
            samples={f"uid-{LONGEST_NAME}": sample},
            children={Ref("ConfigMap", names.golden_tokens("m")): stored} if stored else {},
        )
        (stored,) = plan_of([], observed).apply
    path = tmp_path / names.GOLDEN_TOKENS_FILE
    path.write_text(stored["data"][names.GOLDEN_TOKENS_FILE])  # type: ignore[index]  # a manifest
    for number in range(replicas):
        assert GoldenTokens(path, f"{number:064x}").find() == Golden(tuple(tokens), LONGEST_NAME)
