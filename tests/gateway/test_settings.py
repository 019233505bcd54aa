"""What a gateway cannot be started with is refused by name, with a remedy."""

import os
import subprocess
import sys

import pytest

from quire_gateway.settings import Settings, SettingsError

ENVIRON = {"POD_NAMESPACE": "models", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GATEWAY_PORT", "eighty"),
        ("GATEWAY_PORT", "70000"),
        ("GATEWAY_IDLE_SECONDS", "-1"),
        ("GATEWAY_REQUIRE_KEYS", "yes"),
        ("LOG_LEVEL", "loud"),
        ("GATEWAY_EXTERNAL_SECRETS", "openai"),
        ("GATEWAY_EXTERNAL_SECRETS", '[{"name": "openai"}]'),
        ("GATEWAY_EXTERNAL_NETWORKS", "10.0.0.1/8"),
        ("GATEWAY_OTLP_ENDPOINT", "collector:4318"),
        ("GATEWAY_OTLP_ENDPOINT", "http://collector:port"),
        ("GATEWAY_TRACE_SAMPLE_RATIO", "10"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(name, value):
    with pytest.raises(SettingsError, match=f"QUIRE_{name}"):
        Settings.from_environ({**ENVIRON, f"QUIRE_{name}": value})


def test_a_gateway_that_cannot_be_started_says_why_and_ends_with_2():
    argv = [sys.executable, "-m", "quire_gateway"]
    environ = {**os.environ, **ENVIRON, "QUIRE_LOG_LEVEL": "loud"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.startswith("error: QUIRE_LOG_LEVEL='loud'")) == (2, True)


def test_a_gateway_loads_the_clients_of_a_limit_store_and_of_a_collector_only_where_it_has_them():
    code = "import sys, quire_gateway.__main__\nprint({'redis', 'opentelemetry.sdk'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "set()\n"
