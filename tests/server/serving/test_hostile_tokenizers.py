"""A tokenizer.json whose regular expressions make the tokenizers library panic: refused when it is loaded,
or, where only some text does it, an error of that request alone.
"""

import json
from pathlib import Path

import pytest

from quire_server.errors import ModelCorruptError
from quire_server.text.child_process import ChildProcess
from quire_server.text.tokenizer import Tokenizer
from tests.server import tiny_model
from tests.server.launch import Server

PLAIN = "(a+)+$"  # takes exponential time for a run of one letter
RARE = "(?:q|qq)+$"  # for a letter that no check at load tries
PANIC = "q" * 64 + "!"


def write(directory, pattern, kind):
    """The tiny model, with a tokenizer that splits, or replaces, by this expression first."""
    tiny_model.write(directory)
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    if kind == "normalizer":
        document["normalizer"] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "x"}
    else:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        parts = [split, document["pre_tokenizer"]]
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize("kind", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("pattern", [PLAIN, "(", r"(x+x+)+y", r"\p{NoSuch}", "(1|11)+$"])
def test_a_hopeless_or_invalid_expression_is_refused_when_the_model_is_loaded(tmp_path, kind, pattern):
    with pytest.raises(ModelCorruptError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.load(write(tmp_path, pattern, kind))


def test_a_panic_in_a_child_process_is_its_answer_and_the_child_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    child = ChildProcess(
        "tests.server.text.tokenizing_child", {"model": str(write(tmp_path, RARE, "normalizer"))}
    )
    try:
        assert child.ask() == {"ok": True}
        assert "retry-limit-in-match" in child.ask({"text": PANIC})["error"]
        process = child._process
        assert child.ask({"text": "q"})["tokens"] == 1
        assert child._process is process
    finally:
        child.close()


@pytest.mark.deep
def test_a_text_that_makes_the_tokenizer_panic_is_a_400_and_the_server_lives(tmp_path):
    model = write(tmp_path / "tiny", RARE, "pre_tokenizer")
    with Server(model, tmp_path) as server:
        server.wait_ready()
        children = server.children()
        fields = {"model": "tiny", "max_tokens": 2}
        for path, prompt in (
            ("/v1/completions", {"prompt": PANIC}),
            ("/v1/completions", {"prompt": PANIC * 100}),  # long enough for a thread
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PANIC}]}),
        ):
            refused = server.post(path, fields | prompt)
            assert refused.status_code == 400, refused.text
            assert "tokenizer cannot split this text" in refused.json()["error"]["message"]
        assert server.post("/tokenize", {"model": "tiny", "prompt": PANIC}).status_code == 400
        assert server.post("/v1/completions", fields | {"prompt": "q"}).status_code == 200
        assert server.children() == children
        assert "panicked" in server.log.read_text(), "the library did panic"
