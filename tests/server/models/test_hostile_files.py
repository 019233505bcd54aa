"""Malicious and damaged files: pickles, code, links, pipes, shards elsewhere, changed bits."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.model_dir.files import ModelFiles, write_manifest
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.text.chat import ChatTemplate
from tests.server.models import directories
from tests.server.runner.in_process import InProcessEngine, greedy, load

EMBEDDING = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


class _Trap:
    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.system, ("touch pwned",)


def test_pickled_weights_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (directories.write(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(ConfigError, match="pickled"):
        load(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_classes_named_by_the_config_are_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories.write(
        tmp_path,
        config={
            "auto_map": {"AutoModelForCausalLM": "trap.Model", "AutoConfig": "trap.Config"},
            "model_type": "trap",
        },
    )
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    load(tmp_path)
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", ""]
)
def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    directories.write(tmp_path)
    index = {"weight_map": dict.fromkeys(directories.SHAPES, name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorruptError, match="no safetensors file beside it"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 1}', '{"weight_map": {}}', "nonsense"])
def test_an_index_of_another_form_is_corrupt(tmp_path: Path, index: str) -> None:
    (directories.write(tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelCorruptError, match=r"index\.json"):
        load(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    directories.write(tmp_path)
    index = {"weight_map": {EMBEDDING: "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match="model-00001.safetensors is missing"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directories.write(tmp_path)
    (tmp_path / "again.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    index = {"weight_map": {EMBEDDING: "model.safetensors", DOWN: "again.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorruptError, match="as well"):
        load(tmp_path)


def test_shards_are_read_together(tmp_path: Path) -> None:
    whole, parts = directories.write(tmp_path / "whole"), directories.write(tmp_path / "parts")
    (parts / "model.safetensors").unlink()
    names = list(directories.SHAPES)
    for number, chosen in enumerate((names[::2], names[1::2])):
        arrays = {name: directories.tensors()[name] for name in chosen}
        data = b"".join(array.tobytes() for array in arrays.values())
        (parts / f"{number}.safetensors").write_bytes(
            directories.safetensors(directories.header(arrays), data)
        )
    index = {"weight_map": {name: f"{i % 2}.safetensors" for i, name in enumerate(names)}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = InProcessEngine(load(whole)).generate([[3, 4, 5]], greedy(6))
    assert InProcessEngine(load(parts)).generate([[3, 4, 5]], greedy(6)) == expected


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(json.dumps(directories.CONFIG))
    model = directories.write(tmp_path / "home" / "model")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(outside)
    with pytest.raises(ModelCorruptError, match="leads out"):
        load(model)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    with pytest.raises(ModelCorruptError, match="not a regular file"):
        load(model)


@pytest.mark.parametrize("swapped", ["file", "directory"])
def test_a_link_that_appears_while_a_file_is_opened_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """On a claim that others write."""
    model = directories.write(tmp_path / "home" / "model")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    name, target = (model / "config.json", outside / "config.json") if swapped == "file" else (model, outside)
    open_file, swaps = os.open, 0

    def swap_and_open(path: str | Path, *arguments: int) -> int:
        nonlocal swaps
        if str(path) == str(model / "config.json"):
            swaps += 1
            name.rename(tmp_path / "before")
            name.symlink_to(target)
        return open_file(path, *arguments)

    files = ModelFiles.open(model)
    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(ModelCorruptError, match="changed while it was opened"):
        files.read("config.json", 1000)
    assert swaps == 1


def test_a_hub_cache_with_its_links_to_blobs_loads(tmp_path: Path) -> None:
    snapshot = directories.write(tmp_path / "models--a--b" / "snapshots" / "abc")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    load(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_changed_bit_is_found_by_the_manifest(tmp_path: Path, name: str) -> None:
    directories.write(tmp_path)
    write_manifest(tmp_path)
    load(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[-5] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelCorruptError, match=f"{name}.*sha256"):
        load(tmp_path)


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"files": {"../x": {"size": 1, "sha256": "a"}}}', "{", '{"files": {}}']
)
def test_a_manifest_of_another_form_is_corrupt(tmp_path: Path, manifest: str) -> None:
    (directories.write(tmp_path) / "quire-manifest.json").write_text(manifest)
    with pytest.raises(ModelCorruptError, match="quire-manifest"):
        load(tmp_path)


def test_a_file_of_the_manifest_must_exist(tmp_path: Path) -> None:
    directories.write(tmp_path)
    write_manifest(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "model.safetensors.index.json", "chat_template.jinja"]
)
def test_a_file_that_the_manifest_does_not_name_is_refused(tmp_path: Path, name: str) -> None:
    write_manifest(directories.write(tmp_path))
    (tmp_path / name).write_text('{"weight_map": {"a": "model.safetensors"}, "eos_token_id": 3}')
    with pytest.raises(ModelCorruptError, match=f"does not name {name}.*Remove"):
        ChatTemplate.load(tmp_path)
        load(tmp_path)


def test_progress_ends_at_the_total_and_never_falls(smollm2: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = RunnerConfig(dtype="bfloat16", num_blocks_override=8)
    ModelRunner.load(smollm2, options, lambda loaded, total: seen.append((loaded, total)))
    size = (smollm2 / "model.safetensors").stat().st_size
    assert seen[0] == (0, size) and seen[-1] == (size, size)
    assert [loaded for loaded, _ in seen] == sorted(loaded for loaded, _ in seen) and len(seen) > 20
