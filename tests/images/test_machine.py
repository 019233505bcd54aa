"""What a build gets of the machine: enough to reach an index, and only by mounts."""

import subprocess
from pathlib import Path

from e2e.images import machine

ROOT = Path(__file__).parents[2]


def test_a_value_with_shell_characters_arrives_as_it_is(tmp_path: Path) -> None:
    index = "https://user:p$(id)'\"@index.example.com/simple"
    script = tmp_path / "env"
    script.write_text(machine.shell_script({"https_proxy": "http://proxy:1"}, index, has_bundle=True))

    done = subprocess.run(
        ["sh", "-c", f'. {script}; printf "%s\\n" "$UV_DEFAULT_INDEX" "$https_proxy" "$SSL_CERT_FILE"'],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines() == [index, "http://proxy:1", "/run/secrets/ca"]


def test_nothing_else_of_the_environment_is_passed_on() -> None:
    assert machine.shell_script({"AWS_SECRET_ACCESS_KEY": "x"}, None, has_bundle=False) == ""


def test_a_bundle_that_is_named_but_not_there_is_not_mounted(tmp_path: Path) -> None:
    assert machine.ca_bundle({"SSL_CERT_FILE": str(tmp_path / "none")}) is None
    bundle = tmp_path / "ca.crt"
    bundle.touch()
    assert machine.ca_bundle({"SSL_CERT_FILE": str(bundle)}) == bundle


def test_secrets_are_mounted_in_every_step_that_uses_the_network_and_copied_in_none() -> None:
    for dockerfile in ("server/Dockerfile", "operator/Dockerfile"):
        text = (ROOT / dockerfile).read_text().replace("\\\n", " ")
        steps = [line for line in text.splitlines() if line.startswith("RUN ")]
        for step in steps:
            assert ("apt-get" not in step and "uv pip" not in step) or "--mount=type=secret,id=env" in step
            assert "cp /run/secrets" not in step
