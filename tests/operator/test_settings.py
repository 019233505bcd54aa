"""quire_operator.settings: the operator's environment, read strictly."""

from __future__ import annotations

import pytest

from quire_operator.errors import SettingsError
from quire_operator.settings import Settings

IMAGE = {"QUIRE_ENGINE_IMAGE": "registry.example/quire-server:1"}


def test_the_engine_image_is_the_only_required_setting() -> None:
    settings = Settings.from_environ(IMAGE)
    assert settings == Settings(engine_image="registry.example/quire-server:1")
    assert settings.watch_namespaces == ()
    assert not settings.allow_faults


def test_all_settings_are_read_from_the_environment() -> None:
    settings = Settings.from_environ(
        IMAGE
        | {
            "QUIRE_ENGINE_IMAGE_PULL_POLICY": "Always",
            "QUIRE_ENGINE_IMAGE_PULL_SECRETS": "registry, mirror",
            "POD_NAMESPACE": "ops",
            "POD_NAME": "quire-0",
            "QUIRE_WATCH_NAMESPACES": "team-a, team-b,",
            "QUIRE_ALLOW_FAULTS": "true",
            "QUIRE_MONITORING_NAMESPACE_LABELS": "team=ops,kind=metrics",
            "QUIRE_LOG_LEVEL": "debug",
            "QUIRE_METRICS_PORT": "9090",
        }
    )
    assert settings == Settings(
        engine_image=IMAGE["QUIRE_ENGINE_IMAGE"],
        engine_image_pull_policy="Always",
        engine_image_pull_secrets=("registry", "mirror"),
        operator_namespace="ops",
        pod_name="quire-0",
        watch_namespaces=("team-a", "team-b"),
        allow_faults=True,
        monitoring_namespace_labels=(("team", "ops"), ("kind", "metrics")),
        log_level="debug",
        metrics_port=9090,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUIRE_ENGINE_IMAGE", "  "),
        ("QUIRE_ENGINE_IMAGE_PULL_POLICY", "Sometimes"),
        ("QUIRE_ALLOW_FAULTS", "yes"),
        ("QUIRE_LOG_LEVEL", "loud"),
        ("QUIRE_METRICS_PORT", "http"),
        ("QUIRE_METRICS_PORT", "70000"),
        ("QUIRE_MONITORING_NAMESPACE_LABELS", "monitoring"),
    ],
)
def test_an_invalid_value_is_named_in_the_error(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_environ(IMAGE | {name: value})
