"""The fingerprint of what tokens depend on: equal for equal engines, another for what may compute others."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

from quire_server.core.watermark import Watermark
from quire_server.engine.golden_tokens import fingerprint
from quire_server.model_dir.files import write_manifest
from quire_server.runner import fingerprint as runner_fingerprint
from quire_server.runner.config import RunnerConfig

OPTIONS = RunnerConfig(device="cpu")


def of(directory, options=OPTIONS, **effective):
    return fingerprint(runner_fingerprint.facts(directory, options, is_gpu=False, **effective))


def copy(source, target):
    return Path(shutil.copytree(source, target))


def flip_a_bit(path):
    """On a disk or on the way to it: neither the size nor the time of change tells."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_it_is_the_same_at_each_start_and_for_a_damaged_copy(tiny, tmp_path):
    model = copy(tiny, tmp_path / "model")
    before = of(model)
    assert of(model) == before
    flip_a_bit(model / "model.safetensors")
    assert of(model) == before, "damage must not look like another model"


def test_it_is_the_same_for_copies_with_one_manifest(tiny, tmp_path):
    one, two = (copy(tiny, tmp_path / name) for name in ("one", "two"))
    for path in two.iterdir():
        os.utime(path, ns=(1, 1))
    assert of(one) != of(two), "without a manifest nothing says that they are equal"
    write_manifest(one)
    shutil.copy(one / "quire-manifest.json", two)
    assert of(one) == of(two)


def test_other_weights_in_the_same_place_are_another_model(tiny, tmp_path):
    model = copy(tiny, tmp_path / "model")
    before = of(model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(5, 5))
    assert of(model) != before


_CHANGED = {str: "x", int: 7, float: 0.5, bool: True}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RunnerConfig)])
def test_each_setting_of_the_runner_is_part_of_it_but_those_without_an_effect_on_answers(tiny, name):
    now = getattr(OPTIONS, name)
    other = _CHANGED[type(now)] if now is not None else Path("/x") if "model" in name else 7
    if name == "watermark":
        other = Watermark(b"k" * 32, 0.5, 2.0)
    is_part = of(tiny, dataclasses.replace(OPTIONS, **{name: other})) != of(tiny)
    without_effect = ("watermark", "shares_kv_cache", "kv_staging_bytes", "max_adapters", "max_adapter_rank")
    assert is_part == (name not in without_effect)


def test_what_the_machine_decides_is_part_of_it(tiny, monkeypatch, tmp_path):
    before = of(tiny, dtype="float32")
    assert of(tiny, dtype="bfloat16") != before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 97)
        assert of(tiny, dtype="float32") != before
    with monkeypatch.context() as patch:
        cpu = tmp_path / "cpuinfo"
        cpu.write_text("processor\t: 0\nmodel name\t: Other CPU\nflags\t\t: fpu vme\n\nprocessor\t: 1\n")
        patch.setattr(runner_fingerprint, "_CPU_INFO", cpu)
        assert of(tiny, dtype="float32") != before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert of(tiny, dtype="float32") != before
    with monkeypatch.context() as patch:
        patch.setattr(runner_fingerprint, "_PACKAGES", ("quire_kernels",))
        assert of(tiny, dtype="float32") != before
    assert of(tiny, dtype="float32") == before
