"""Whatever source the API admits, `quire-server fetch` can be started with."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.api import specs
from quire_operator import names, resources, spec
from quire_operator.resources import shared_model
from quire_operator.settings import Settings
from quire_operator.spec import schema
from quire_operator.status.reasons import REASONS
from quire_server.api.protocol.names import is_adapter_name
from quire_server.fetch import adapter_list, adapter_sidecar, source
from quire_server.fetch.command import parser
from quire_server.termination import EXIT_CODES
from tests.examples import examples

SETTINGS = Settings(engine_image="registry.example/quire-server:1", credential_hosts=("*.example.com",))


def pod(body: specs.Body) -> dict[str, Any]:
    template = resources.build(spec.parse(body), SETTINGS)[-1]["spec"]["template"]["spec"]
    assert isinstance(template, dict)
    return template


@pytest.mark.parametrize("body", specs.DOWNLOADED[:4], ids=specs.name_of)
def test_the_fetcher_understands_its_arguments_and_the_server_looks_where_it_writes(body: specs.Body) -> None:
    built = pod(body)
    command, *arguments = built["initContainers"][0]["args"]
    understood = parser().parse_args(arguments)
    assert command == "fetch"
    source.parse(understood.source)
    assert understood.status_port == names.PORT_HEALTH
    assert built["containers"][0]["args"][:2] == ["serve", str(understood.to)]


ADMITTED = st.one_of(
    st.builds(
        lambda repo, revision: f"hf://{repo}@{revision}",
        st.from_regex(schema.HUB_REPO, fullmatch=True),
        st.from_regex(schema.HUB_REVISION, fullmatch=True).filter(lambda text: len(text) <= 200),
    ),
    st.from_regex(f"(s3|gs)://{schema.OBJECTS}", fullmatch=True).filter(lambda text: len(text) <= 900),
    st.from_regex(f"oci://{schema.OCI_REFERENCE}", fullmatch=True),
)


@settings(max_examples=examples(300))
@given(ADMITTED)
def test_whatever_the_api_admits_names_a_source(text: str) -> None:
    source.parse(text)


def test_the_operator_knows_how_a_fetcher_ends() -> None:
    known = spec_reasons()
    ends = ("MODEL_ACCESS_DENIED", "MODEL_NOT_FOUND", "MODEL_DOWNLOAD_FAILED", "MODEL_CORRUPT", "OUT_OF_DISK")
    codes = {reason.value: code for reason, code in EXIT_CODES.items() if reason.name in ends}
    assert {name: known[name] for name in codes} == codes


def test_the_job_gives_up_where_another_try_cannot_help_and_only_there() -> None:
    of_a_fetcher = {"ConfigError", "ModelCorrupt", "ModelNotFound", "OutOfDisk", "ModelAccessDenied"}
    final = {code for reason, code in EXIT_CODES.items() if reason.value in of_a_fetcher}
    assert set(shared_model.FINAL_EXIT_CODES) == final
    assert all(REASONS[name].final for name in of_a_fetcher)
    assert not REASONS["ModelDownloadFailed"].final


@pytest.mark.parametrize("body", specs.DOWNLOADED[4:], ids=specs.name_of)
def test_the_job_s_fetcher_understands_its_arguments_and_the_server_looks_where_it_writes(
    body: specs.Body,
) -> None:
    job = next(child for child in resources.build(spec.parse(body), SETTINGS) if child["kind"] == "Job")
    command, *arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    understood = parser().parse_args(arguments)
    assert command == "fetch"
    source.parse(understood.source)
    assert pod(body)["containers"][0]["args"][:2] == ["serve", str(understood.to)]


def listed(body: specs.Body) -> adapter_list.AdapterList:
    """What the sidecar reads of the list of adapters."""
    name = names.adapters(body["metadata"]["name"])
    children = {child["metadata"]["name"]: child for child in resources.build(spec.parse(body), SETTINGS)}
    data = children[name]["data"][names.ADAPTER_LIST_FILE]
    return adapter_list.parse(data.encode(), PurePosixPath(names.PATH_ADAPTER_CLAIMS))


def test_the_sidecar_understands_its_arguments_and_the_server_looks_where_it_writes() -> None:
    (container,) = pod(specs.ADAPTED)["initContainers"]
    command, *arguments = container["args"]
    understood = adapter_sidecar.parser().parse_args(arguments)
    assert command == "fetch-adapters"
    assert str(understood.list) == f"{names.PATH_ADAPTER_LIST}/{names.ADAPTER_LIST_FILE}"
    assert str(understood.to) == names.PATH_ADAPTERS
    assert str(understood.claims) == names.PATH_ADAPTER_CLAIMS


def test_the_sidecar_takes_adapters_of_every_source() -> None:
    found = listed(specs.ADAPTED)
    assert found.refusals == ()
    assert [entry.name for entry in found.entries] == [
        one["name"] for one in specs.ADAPTED["spec"]["adapters"]
    ]


def test_variables_that_the_administrator_allows_are_taken_by_the_sidecar() -> None:
    allowing = Settings(engine_image="e", credential_hosts=("*",), allowed_env=("GIT_TRACE",))
    variables = [{"name": "GIT_TRACE", "value": "1"}]
    body = specs.merged(
        specs.DOWNLOADED[4],
        {
            "spec": {
                "cache": {"download": {"env": variables}},
                "engine": {"maxAdapters": 2},
                "adapters": specs.ADAPTED["spec"]["adapters"][:1],
            }
        },
    )
    children = resources.build(spec.parse(body), allowing)
    (data,) = [child["data"] for child in children if child["metadata"]["name"] == names.adapters("shared")]
    (container,) = children[-1]["spec"]["template"]["spec"]["initContainers"]
    understood = adapter_sidecar.parser().parse_args(container["args"][1:])
    found = adapter_list.parse(
        data[names.ADAPTER_LIST_FILE].encode(), understood.claims, understood.allow_env
    )
    assert found.refusals == ()
    assert found.entries[0].environment["GIT_TRACE"] == "1"


@settings(max_examples=examples(100))
@given(specs.random_bodies())
def test_whatever_adapters_the_api_admits_the_sidecar_takes(body: specs.Body) -> None:
    if spec.parse(body).follows_adapters:
        assert listed(body).refusals == ()


@given(st.from_regex(schema.ADAPTER_NAME, fullmatch=True) | st.text(max_size=300))
def test_an_adapter_may_have_the_names_that_the_server_gives_adapters(text: str) -> None:
    admitted = re.fullmatch(schema.ADAPTER_NAME, text) is not None and len(text) <= 253
    assert admitted == is_adapter_name(text)


def spec_reasons() -> dict[str, int | None]:
    return {name: reason.exit_code for name, reason in REASONS.items()}
