"""`quire-operator render`: a manifest in, the children out, without a cluster."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from e2e.api import profiles, specs
from quire_operator import resources, spec
from quire_operator.__main__ import main
from quire_operator.settings import Settings

EXAMPLE = specs.ROOT / "examples" / "smollm2.yaml"


def write(path: Path, *bodies: object) -> str:
    file = path / "models.yaml"
    file.write_text(yaml.safe_dump_all(bodies), encoding="utf-8")
    return str(file)


def test_the_example_renders_to_the_children_that_are_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(EXAMPLE)]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    settings = Settings(engine_image="your-registry.example/quire-server:dev")
    body = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert printed == list(resources.build(spec.parse(body), settings))


def test_the_image_comes_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_IMAGE", "registry.example/engine:7")
    assert main(["render", str(EXAMPLE)]) == 0
    assert "image: registry.example/engine:7\n" in capsys.readouterr().out


def test_standard_input_and_several_documents_are_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = specs.merged(specs.minimal(), {"metadata": {"name": "other"}})
    documents = [specs.minimal(), {"kind": "Secret", "apiVersion": "v1"}, None, other]
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump_all(documents)))
    assert main(["render", "-"]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [child["metadata"]["name"] for child in printed if child["kind"] == "Service"] == [
        "minimal",
        "other",
    ]


def test_an_error_names_the_file_the_object_and_the_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = specs.minimal(engine={"env": [{"name": "LD_PRELOAD"}]})
    file = write(tmp_path, specs.minimal(), wrong)
    assert main(["render", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        f"{file}: LLMDeployment minimal: spec.engine.env[0].name: LD_PRELOAD is reserved"
    )
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "kind: Pod\n", "{", "kind: LLMDeployment\n", "\xff"])
def test_input_without_an_llmdeployment_is_an_error_without_traceback(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_bytes(text.encode("latin-1"))
    assert main(["render", str(file)]) == 2
    assert capsys.readouterr().err.startswith(str(file))


def test_a_missing_file_is_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "/does/not/exist.yaml"]) == 2
    assert "/does/not/exist.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resources_of", "field"),
    [
        ("spec", "spec.resources.profileRef"),
        ("prefill", "spec.disaggregation.prefill.resources.profileRef"),
    ],
)
def test_a_profile_that_is_not_there_is_named_by_its_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, resources_of: str, field: str
) -> None:
    known = profiles.FULL["metadata"]["name"]
    named = {
        place: {
            "cpu": "1",
            "memory": "96Gi",
            "profileRef": {"name": "lost" if place == resources_of else known},
        }
        for place in ("spec", "prefill")
    }
    roles = {"prefill": {"resources": named["prefill"]}, "decode": {}}
    body = specs.minimal(resources=named["spec"], disaggregation=roles)
    assert main(["render", write(tmp_path, profiles.FULL, body)]) == 2
    said = capsys.readouterr().err
    assert f"{field}: put the AcceleratorProfile lost into the same input" in said
