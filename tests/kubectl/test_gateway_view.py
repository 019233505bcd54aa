"""LLMRoutes and LLMClients at a terminal: what is refused and why, what to do, and no key."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
from argparse import Namespace
from typing import Any

import pytest

from quire_kubectl import gateway_view, key
from quire_kubectl.terminal import Look

SPEC = {
    "models": ["chat", "chat-latest"],
    "rules": [
        {
            "match": {"maxPromptTokens": 8000},
            "targets": [{"deployment": "small", "weight": 3}, {"deployment": "big"}],
        },
        {"targets": [{"deployment": "gone"}]},
    ],
}
DEPLOYMENTS = {
    name: {"status": {"phase": "Serving", "replicas": 2, "readyReplicas": ready}}
    for name, ready in (("small", 2), ("big", 1), ("new", 0))
}


def condition(kind: str, holds: bool, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": str(holds), "reason": reason, "message": message}


def document(
    spec: dict[str, Any], *conditions: dict[str, str], generation: int = 1, **status: Any
) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team-a", "name": "it", "generation": generation},
        "spec": spec,
        "status": {
            "observedGeneration": 1,
            "gateways": {"seen": 2, "applied": 2},
            "conditions": [*conditions],
            **status,
        },
    }


READY = condition("Ready", True, "Ready", "A target has a replica that is ready.")


def test_a_route_shows_each_rule_with_its_shares_and_the_replicas_that_are_ready() -> None:
    missing = condition(
        "ResolvedRefs", False, "DeploymentNotFound", "There is no LLMDeployment gone in team-a."
    )
    text = gateway_view.route_details(document(SPEC, READY, missing), DEPLOYMENTS)
    assert text.startswith("team-a/it: Ready")
    assert "75 % small (Serving, 2 of 2 replicas ready)" in text
    assert "25 % big (Serving, 1 of 2 replicas ready)" in text
    assert "100 % gone (there is no such LLMDeployment)" in text
    assert "maxPromptTokens: 8000" in text and "2 of 2 gateways use this" in text
    assert "DeploymentNotFound: There is no" in text and "Create the LLMDeployment" in text


def test_a_rollout_takes_its_share_of_every_rule_and_says_how_far_it_is() -> None:
    rollout = {"deployment": "new", "steps": [{"weight": 10}, {"weight": 100}]}
    status = {"step": 0, "currentWeight": 20, "phase": "Progressing", "message": "Step 1 of 2 has begun."}
    text = gateway_view.route_details(
        document({**SPEC, "rollout": rollout}, READY, rollout=status), DEPLOYMENTS
    )
    assert "60 % small" in text and "20 % big" in text and "80 % gone" in text
    assert text.count("20 % new (Serving, 0 of 2 replicas ready)") == 2
    assert "to new: Progressing, step 1 of 2" in text
    assert text.count("Step 1 of 2 has begun.") == 1


def test_a_kill_switch_says_where_it_holds_and_how_to_end_it() -> None:
    spec = {**SPEC, "killSwitch": {"enabled": True, "message": "Audit."}}
    killed = condition("Ready", False, "KillSwitch", "Requests are refused: killSwitch.enabled is true.")
    one = document(spec, killed, gateways={"seen": 3, "applied": 2})
    text = gateway_view.route_details(one, DEPLOYMENTS)
    assert text.startswith("team-a/it: KillSwitch")
    assert "ON, at 2 of 3 gateways use this: Audit." in text
    assert "Set spec.killSwitch.enabled to false" in text
    assert gateway_view.code(one) == 3


def test_a_change_that_no_gateway_has_seen_is_not_called_applied() -> None:
    one = document(SPEC, READY, generation=2)
    assert "this change has reached none" in gateway_view.route_details(one, {})
    assert gateway_view.code(one) == 3 and gateway_view.code(document(SPEC, READY)) == 0


def test_a_client_shows_its_budget_limits_and_usage_and_no_digest() -> None:
    digest = "ab" * 32
    spec = {
        "keyHashes": [digest, "cd" * 32],
        "limits": {"tokensPerMinute": 2000, "concurrentRequests": 4},
        "budget": {"period": "Month", "cost": "250.00", "tokens": 1000},
    }
    usage = {"period": "2026-11", "requests": 9, "totalTokens": 900, "cost": "50.5"}
    spent = condition("Ready", False, "BudgetSpent", "Requests are refused until the month ends, in UTC.")
    text = gateway_view.client_details(document(spec, spent, usage=usage))
    assert "2000 tokens a minute, 4 requests at once" in text
    assert "90% of 1000 tokens a month, 20% of 250.00 a month" in text
    assert "2026-11: 900 tokens in 9 requests, cost 50.5" in text
    assert "Raise spec.budget" in text and digest[:8] not in text


def test_a_suspended_client_is_said_to_be_refused() -> None:
    suspended = condition("Ready", False, "Suspended", "Its keys are refused: suspended is true.")
    text = gateway_view.client_details(document({"keyHashes": ["ab" * 32], "suspended": True}, suspended))
    assert "1, refused: spec.suspended is true" in text and "Set spec.suspended to false" in text


def test_of_all_those_that_are_not_ready_come_first() -> None:
    failed = document(SPEC, condition("Ready", False, "NoReplica", "No target has a replica."))
    failed["metadata"] = {**failed["metadata"], "name": "zzz"}
    lines = gateway_view.table("LLMRoute", [document(SPEC, READY), failed]).splitlines()
    assert [line.split()[1] for line in lines] == ["NAME", "zzz", "it"]
    assert "NoReplica" in lines[1] and lines[1].endswith("2/2")
    assert gateway_view.table("LLMClient", []) == "No LLMClients here."


@pytest.mark.parametrize("width", [40, 80])
def test_texts_of_others_fit_the_width_and_have_no_control_characters(width: int) -> None:
    rude = condition("Ready", False, "NoReplica", "\x1b[2Jx" * 30)
    text = gateway_view.route_details(document(SPEC, rude), DEPLOYMENTS, Look(width=width))
    assert "\x1b[2J" not in text and max(map(len, text.splitlines())) <= width


def test_an_object_that_no_gateway_has_seen_is_unknown() -> None:
    bare = {"metadata": {"namespace": "team-a", "name": "it", "generation": 1}, "spec": SPEC}
    assert "Unknown" in gateway_view.route_details(bare, {}) and gateway_view.code(bare) == 3


def test_a_new_key_is_printed_with_the_patch_that_adds_its_digest() -> None:
    out = io.StringIO()
    assert key.run(Namespace(name="search", namespace="models"), out) == 0
    secret = next(line for line in out.getvalue().splitlines() if line.startswith("sk-"))
    digest = hashlib.sha256(secret.encode()).hexdigest()
    command = shlex.split(out.getvalue().splitlines()[-1])
    assert command[:6] == ["kubectl", "patch", "llmclient", "search", "--namespace", "models"]
    assert json.loads(command[-1]) == [{"op": "add", "path": "/spec/keyHashes/-", "value": digest}]
    assert len(secret) > 60 and secret not in command[-1]
    again = io.StringIO()
    key.run(Namespace(name="search", namespace=None), again)
    assert secret not in again.getvalue() and "--namespace" not in again.getvalue()
