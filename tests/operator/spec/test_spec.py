"""quire_operator.spec: parsing keeps every value, and errors name the field and the remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.api import specs
from quire_operator import spec
from quire_operator.errors import SpecError
from tests.examples import examples


def parse(**fields: Any) -> spec.LLMDeployment:
    return spec.parse(specs.minimal(**fields))


def refusal(body: Any) -> SpecError:
    with pytest.raises(SpecError) as error:
        spec.parse(body)
    return error.value


def test_a_minimal_object_has_the_documented_defaults() -> None:
    model = parse()
    assert (model.name, model.namespace, model.uid, model.generation) == ("minimal", "default", "", 0)
    assert model.replicas == 1
    assert model.served_names == ("minimal",)
    assert model.service_account_name == "minimal"
    assert model.url == "http://minimal.default.svc/v1"
    assert model.drain_timeout_seconds == 120


def test_every_field_is_parsed() -> None:
    read = specs.properties(spec.parse(specs.FULL).spec)
    written = copy.deepcopy(specs.FULL["spec"])
    written["engine"]["kvCache"]["memory"] = "1536Mi"  # as the API server spells 1.5Gi
    # The default: one GPU is one rank.
    written["parallelism"] = {"tensor": 1, "pipeline": 1, "nodes": 1}
    # Defaults: another task excludes most of the engine's settings.
    written["task"], written["engine"]["pooling"] = "Generate", "Auto"
    assert read == written
    embedding = spec.parse(specs.EMBEDDING).spec
    assert (embedding.task, embedding.engine.pooling) == ("Embed", "CLS")
    sharded = spec.parse(specs.SHARDED).spec.parallelism
    assert (sharded.tensor, sharded.pipeline, sharded.ranks) == (3, 2, 6)


def test_the_identity_comes_from_the_metadata() -> None:
    model = spec.parse(
        specs.merged(specs.MINIMAL, {"metadata": {"namespace": "a", "uid": "u", "generation": 7}})
    )
    assert (model.namespace, model.uid, model.generation) == ("a", "u", 7)


def test_a_suspended_llmdeployment_has_zero_replicas() -> None:
    assert parse(suspend=True, replicas=3).replicas == 0
    assert parse(replicas=0).replicas == 0
    assert parse(replicas=3).replicas == 3


def test_an_alias_equal_to_the_served_name_is_listed_once() -> None:
    model = parse(model={"servedName": "m", "aliases": ["a", "m"]})
    assert model.served_names == ("m", "a")


def test_the_url_contains_a_non_default_port() -> None:
    assert parse(networking={"service": {"port": 8080}}).url == "http://minimal.default.svc:8080/v1"


def test_null_means_absent() -> None:
    assert parse(drain=None, engine={"kvCache": {"memory": None}}) == parse()


def test_optional_text_may_be_empty() -> None:
    assert parse(security={"serviceAccountName": ""}, model={"servedName": ""}) == parse()


@pytest.mark.parametrize(
    ("fields", "path", "says"),
    [
        ({"model": {"source": {"pvc": {"claimName": ""}}}}, "spec.model.source.pvc.claimName", "empty"),
        ({"model": {"source": {"git": {}}}}, "spec.model.source.git", "known here: gcs"),
        ({"model": {"source": {"s3": {}}}}, "spec.model.source.s3.uri", "required"),
        ({"engine": {"env": [{"value": "x"}]}}, "spec.engine.env[0].name", "required"),
        ({"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.engine.env[1].name", "twice"),
        ({"engine": {"env": {"A": "b"}}}, "spec.engine.env", "expected a list"),
        ({"engine": {"extraArgs": [1]}}, "spec.engine.extraArgs[0]", "expected text"),
        ({"engine": {"extraArgs": ["a\0b"]}}, "spec.engine.extraArgs[0]", "does not match"),
        ({"engine": {"extraArgs": ["x"] * 65}}, "spec.engine.extraArgs", "more than 64"),
        ({"engine": {"dtype": "auto"}}, "spec.engine.dtype", "one of Auto, Float32, BFloat16"),
        ({"engine": {"quantization": "Int3"}}, "spec.engine.quantization", "one of Auto, None, Int8, Int4"),
        ({"engine": {"prefixCaching": "yes"}}, "spec.engine.prefixCaching", "true or false"),
        ({"engine": {"maxNumSeqs": 0}}, "spec.engine.maxNumSeqs", "1 to 4096"),
        ({"engine": {"maxNumSeqs": "8"}}, "spec.engine.maxNumSeqs", "whole number"),
        ({"replicas": True}, "spec.replicas", "whole number"),
        ({"resources": {"cpu": 0.5}}, "spec.resources.cpu", "quoted"),
        ({"resources": None}, "spec.resources", "required"),
        ({"scheduling": {"nodeSelector": {"a": 1}}}, "spec.scheduling.nodeSelector.a", "expected text"),
        ({"drain": []}, "spec.drain", "expected an object"),
        (
            {"security": {"apiKeysSecretRef": {"name": "a", "namespace": "b"}}},
            "spec.security.apiKeysSecretRef.namespace",
            "unknown field",
        ),
        (
            {"networking": {"networkPolicy": {"allowFrom": [{"ipBlock": {"cidr": "10.0.0.0/99"}}]}}},
            "spec.networking.networkPolicy.allowFrom[0].ipBlock.cidr",
            "10.0.0.0/8",
        ),
    ],
)
def test_an_error_names_the_field_and_what_is_expected(fields: dict[str, Any], path: str, says: str) -> None:
    error = refusal(specs.minimal(**fields))
    assert error.field_path == path
    assert says in error.message


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"apiVersion": "v1", "kind": "Pod"},
        {**specs.MINIMAL, "metadata": None},
        {**specs.MINIMAL, "metadata": {}},
        {**specs.MINIMAL, "spec": None},
        {**specs.MINIMAL, "spec": []},
    ],
)
def test_an_object_of_another_kind_or_without_required_parts_is_refused(body: Any) -> None:
    refusal(body)


@settings(max_examples=examples(60))
@given(specs.random_bodies())
def test_a_spec_round_trips_through_its_properties(body: specs.Body) -> None:
    model = spec.parse(body)
    assert spec.parse({**body, "spec": specs.properties(model.spec)}) == model


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["model", "engine", "resources", "scheduling", "networking", "rollout", "replicas"]),
    _JSON,
)
def test_arbitrary_field_values_raise_a_spec_error_and_nothing_else(field: str, junk: Any) -> None:
    body = {**specs.MINIMAL, "spec": {**specs.MINIMAL["spec"], field: junk}}
    try:
        spec.parse(body)
    except SpecError as error:
        assert error.field_path.startswith("spec")
