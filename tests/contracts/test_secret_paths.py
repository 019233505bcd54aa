"""No field and no flag lets the server read a file of a mounted Secret for anything but its own purpose."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import names, resources, spec
from quire_operator.errors import SpecError
from quire_operator.settings import Settings
from quire_server import flags
from quire_server.config import ServeConfig, parse_args
from quire_server.errors import ConfigError
from tests import kubelet

SETTINGS = Settings(engine_image="registry.example/quire-server:1", credential_hosts=("*",))
SECRETS = (
    names.PATH_API_KEYS,
    names.PATH_AUTH_KEY,
    names.PATH_WATERMARK,
    names.PATH_GCS_KEY,
    names.PATH_PULL_SECRET,
)
# Which setting is for which Secret.
MEANT = {"api_keys_dir": names.PATH_API_KEYS, "watermark_key_path": f"{names.PATH_WATERMARK}/secret.key"}
TEXTS = [
    path
    for path, schema in specs.schemas()
    if path.startswith("spec.") and schema.get("type") == "string" and "enum" not in schema
]
READS = [field.name for field in dataclasses.fields(ServeConfig) if field.metadata.get("parse") is flags.path]


def spellings() -> Iterator[str]:
    for path in SECRETS:
        for file in ("key", "secret.key"):
            yield from (f"{path}/{file}", f"../../..{path}/{file}", f"x/../../..{path}/{file}")


def with_text(body: Any, path: list[str], text: str) -> Any:
    """A copy of `body` with `text` at `path`; lists get one entry."""
    if not path:
        return text
    name, rest = path[0], path[1:]
    inner = body.get(name.removesuffix("[]")) if isinstance(body, dict) else None
    if name.endswith("[]"):
        first = inner[0] if isinstance(inner, list) and inner else {}
        return {**body, name.removesuffix("[]"): [with_text(first, rest, text)]}
    return {**(body if isinstance(body, dict) else {}), name: with_text(inner or {}, rest, text)}


def files_read(body: specs.Body) -> dict[str, str]:
    """By setting, the paths that the server would read; empty where it is not started."""
    try:
        children = resources.build(spec.parse(body), SETTINGS)
    except SpecError:
        return {}
    pod = next(child for child in children if child["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (environment,) = [child["data"] for child in children if child["kind"] == "ConfigMap"]
    arguments, variables = kubelet.started_with(container, environment)
    try:
        config = parse_args(arguments[1:], variables)
    except ConfigError:
        return {}
    return {name: str(value) for name in READS if (value := getattr(config, name)) is not None}


def assert_no_secret_is_read(body: specs.Body) -> None:
    for name, path in files_read(body).items():
        plain = re.sub(r"/[^/]+/\.\.", "", path)
        within = plain.startswith(tuple(f"{secret}" for secret in SECRETS)) or ".." in path.split("/")
        assert not within or path == MEANT.get(name), f"{name} reads {path}"


def test_the_whole_example_reads_the_secrets_that_it_names() -> None:
    read = files_read(specs.FULL)
    assert MEANT.items() <= read.items(), "the test sees what the server reads"


@pytest.mark.parametrize("path", TEXTS)
def test_no_text_of_the_spec_names_a_file_of_a_secret(path: str) -> None:
    for text in spellings():
        for body in (specs.FULL, *specs.DOWNLOADED[:4]):
            assert_no_secret_is_read(with_text(body, path.split("."), text))


@pytest.mark.parametrize("flag", [field.name.replace("_", "-") for field in dataclasses.fields(ServeConfig)])
def test_no_flag_of_a_user_names_a_file_of_a_secret(flag: str) -> None:
    for text in spellings():
        for arguments in ([f"--{flag}={text}"], [f"--{flag}", text]):
            assert_no_secret_is_read(specs.minimal(engine={"extraArgs": arguments}))


@pytest.mark.parametrize("flag", [name.replace("_", "-") for name in READS])
def test_no_variable_that_an_argument_refers_to_becomes_a_flag(flag: str) -> None:
    variable = {"name": "OTEL_SERVICE_NAME", "value": f"--{flag}={names.PATH_WATERMARK}/key"}
    for argument in ("$(OTEL_SERVICE_NAME)", "$$(OTEL_SERVICE_NAME)", "$$$(OTEL_SERVICE_NAME)"):
        assert_no_secret_is_read(specs.minimal(engine={"extraArgs": [argument], "env": [variable]}))


def test_a_watermark_key_is_mounted_only_where_the_watermark_is_on() -> None:
    reference = {"keySecretRef": {"name": "any", "key": "password"}}
    for mode, mounted in (("Off", False), ("Always", True)):
        body = specs.minimal(engine={"watermark": {"mode": mode, **reference}})
        text = str(resources.build(spec.parse(body), SETTINGS)[-1]["spec"]["template"])
        assert (names.PATH_WATERMARK in text, "password" in text) == (mounted, mounted)
