"""Files that are small on disk and large as objects: refusing them takes bounded memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_server.errors import ModelCorruptError
from quire_server.model_dir.files import parse_json_object
from tests.server.models import directories

MB = 1 << 20
BOUND_MB, TOKENIZER_MB = 350, 800  # the tokenizer's parser is not ours


def lists(size: int) -> bytes:
    return b'{"a":[' + b"[]," * (size // 3) + b"[]]}"


def objects(size: int) -> bytes:
    return b'{"a":[' + b'{"b":0},' * (size // 8) + b"{}]}"


def texts(size: int) -> bytes:
    """As short as possible with all of them different."""
    return b"{" + b",".join(b'"%x":"%x"' % (i, i) for i in range(size // 16)) + b"}"


def wide(size: int) -> bytes:
    """One wide character makes each string take four bytes per character."""
    return json.dumps({"a": "\N{GRINNING FACE}" + "x" * size}, ensure_ascii=False).encode()


def as_header(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def as_vocabulary(data: bytes) -> bytes:
    """The place where a tokenizer's parser buffers everything until it knows the model's type."""
    return b'{"version":"1.0","model":' + data + b"}"


def attacks() -> Iterator[tuple[str, str, bytes]]:
    """(name, file, content): far above the limits, and at the limits."""
    yield "config far above", "config.json", lists(7 * MB)
    yield "index far above", "model.safetensors.index.json", lists(60 * MB)
    yield "header far above", "model.safetensors", as_header(lists(90 * MB))
    yield "tokenizer far above", "tokenizer.json", as_vocabulary(lists(63 * MB))
    yield "tokenizer of too many objects", "tokenizer.json", as_vocabulary(objects(15 * MB))
    for form, size in ((lists, 1.5), (objects, 0.9), (texts, 3), (wide, 3.9)):
        yield f"config of {form.__name__}", "config.json", form(int(size * MB))
        yield f"settings of {form.__name__}", "tokenizer_config.json", form(int(size * MB))
    for form, size in ((lists, 1.6), (objects, 0.9), (texts, 14), (wide, 15)):
        yield f"index of {form.__name__}", "model.safetensors.index.json", form(int(size * MB))
        yield f"header of {form.__name__}", "model.safetensors", as_header(form(int(size * MB)))
    for form, size in ((lists, 4.2), (objects, 2.2), (texts, 40), (wide, 47)):
        yield f"tokenizer of {form.__name__}", "tokenizer.json", as_vocabulary(form(int(size * MB)))


@pytest.mark.deep
def test_refusing_a_file_takes_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    roots = [directories.write(tmp_path / "good")]
    for what, name, contents in attacks():
        roots.append(directories.write(tmp_path / what))
        (roots[-1] / name).write_bytes(contents)
    command = [sys.executable, "-m", "tests.server.models.peak_memory", *map(str, roots)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (_, outcome, start), *others = [json.loads(line) for line in said.splitlines()]
    assert outcome == "loaded" and len(others) == len(roots) - 1
    for what, outcome, peak in others:
        assert outcome.startswith("ModelCorruptError") or what.startswith("settings"), f"{what}: {outcome}"
        bound = TOKENIZER_MB if what.startswith("tokenizer") else BOUND_MB
        assert peak - start < bound, f"{what}: {peak - start} MB"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_many_values_are_counted_in_any_encoding_that_json_may_have(encoding: str) -> None:
    with pytest.raises(ModelCorruptError, match="values"):
        parse_json_object(lists(2 * MB).decode().encode(encoding), "config.json")


def test_the_header_of_a_file_with_very_many_tensors_is_accepted() -> None:
    entries = {
        f"model.layers.{number // 500}.mlp.experts.{number % 500}.down_proj.weight": {
            "dtype": "BF16",
            "shape": [4096, 1536],
            "data_offsets": [number * 12582912, (number + 1) * 12582912],
        }
        for number in range(90_000)
    }
    assert parse_json_object(json.dumps(entries).encode(), "model.safetensors") == entries
