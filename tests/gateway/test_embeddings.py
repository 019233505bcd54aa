"""A gateway before a model that embeds texts: its paths, its accounts, its keys."""

import hashlib

import httpx
import pytest

from tests.gateway.kube_stub import KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.server.embeddings import embedders
from tests.server.launch import NO_TLS, Server

KEY = {"authorization": "Bearer sk-alice"}
BODIES = {
    "/v1/embeddings": {"input": ["a b", "c"]},
    "/pooling": {"input": [[2, 5, 3]]},
    "/v1/rerank": {"query": "a", "documents": ["b c", "a"]},
    "/v1/score": {"text_1": "a", "text_2": ["b c", "a"]},
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    model = embedders.write(tmp_path_factory.mktemp("models") / "bert", "bert", pooling="mean_tokens")
    with Server(model, tmp_path_factory.mktemp("engine"), "--task", "embed") as engine, KubeStub() as kube:
        engine.wait_ready()
        ports = {"port": engine.port, "health_port": engine.health_port}
        kube.put(endpoint_slice("s", {"a": "127.0.0.1"}, **ports))
        spec = {"models": ["search"], "rules": [{"targets": [{"deployment": "tiny"}]}]}
        kube.put(llm_object("LLMRoute", "r", spec | {"fallbacks": [{"canned": "Later."}]}))
        limits = {"tokensPerMinute": 60}
        digest = hashlib.sha256(b"sk-alice").hexdigest()
        kube.put(llm_object("LLMClient", "alice", {"keyHashes": [digest], "limits": limits}))
        with Gateway(kube.url, tmp_path_factory.mktemp("gateway")) as gateway:
            gateway.engine = engine
            yield gateway.wait_replicas(1)


def ask(gateway, path, **body):
    return httpx.post(
        gateway.url + path, json={"model": "search", **body}, headers=KEY, timeout=60, verify=NO_TLS
    )


@pytest.mark.parametrize("path", BODIES)
def test_every_path_is_relayed_with_its_answer_and_its_tokens_are_the_clients(gateway, path):
    before = len(gateway.requests())
    answer = ask(gateway, path, **BODIES[path])
    assert answer.status_code == 200, answer.text
    direct = gateway.engine.post(path, {"model": "tiny", **BODIES[path]}).json()
    for name in ("data", "results", "usage"):
        assert answer.json().get(name) == direct.get(name)
    line = gateway.wait_requests(1, before)[-1]
    tokens = direct["usage"]["prompt_tokens"]
    assert (line["client"], line["prompt_tokens"], line["completion_tokens"]) == ("models/alice", tokens, 0)


def test_a_key_is_needed_and_the_paths_of_the_other_task_say_so(gateway):
    bare = httpx.post(f"{gateway.url}/v1/embeddings", json={"model": "search", "input": "a"}, verify=NO_TLS)
    assert bare.status_code == 401
    refused = ask(gateway, "/v1/completions", prompt="a", max_tokens=1)
    assert refused.status_code == 404 and "--task embed" in refused.json()["error"]["message"]


def test_inputs_beyond_the_clients_limit_are_refused_before_they_are_sent(gateway):
    refused = ask(gateway, "/v1/embeddings", input=["a " * 60] * 4)
    assert refused.status_code == 429, refused.text
