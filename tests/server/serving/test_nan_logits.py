"""NaN weights of one token: only answers whose logits contain NaN end with an error."""

import json

import openai
import pytest
from safetensors.numpy import load_file, save_file

from quire_server.engine.canary import Canary
from quire_server.text.tokenizer import Tokenizer
from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.runner.in_process import InProcessEngine, greedy, load

PROMPT, LENGTH = "Once", 12


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model whose greedy answer to PROMPT reaches a token without an embedding, but not at once."""
    directory = tiny_model.write(tmp_path_factory.mktemp("models") / "poisoned")
    prompt = Tokenizer.load(directory).encode(PROMPT)
    engine = InProcessEngine(load(directory))
    (answer,) = engine.generate([prompt], greedy(LENGTH))
    config = json.loads((directory / "config.json").read_text())
    canary = Canary.for_model(config["vocab_size"], config["max_position_embeddings"])
    proof = engine.generate([list(canary.prompt)], greedy(canary.num_tokens))[0]
    token = next(t for t in answer[2:-1] if t not in {*prompt, *answer[:2], *canary.prompt, *proof})
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return directory


def test_nan_logits_fail_only_their_own_request(poisoned, tmp_path):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}
    with Server(poisoned, tmp_path) as server, server.wait_ready().client() as client:
        with pytest.raises(openai.InternalServerError, match="no finite number"):
            client.completions.create(**fields)
        streamed = []
        with pytest.raises(openai.APIError, match="no finite number"):
            streamed.extend(client.completions.create(**fields, stream=True))
        assert streamed, "it breaks in mid-stream"
        assert client.completions.create(**{**fields, "max_tokens": 2}).usage.completion_tokens == 2
        assert server.metric("llm_requests_total", status="error") == 2
