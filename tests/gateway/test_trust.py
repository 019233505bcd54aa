"""An engine that trusts a gateway: it answers what that one has signed, and nothing else."""

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.server import adapter_files, tiny_model
from tests.server.launch import NO_TLS, Server

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def private_key(tmp_path_factory):
    """The file of the gateway's key; its public one is beside it in `public`."""
    directory, key = tmp_path_factory.mktemp("keys"), Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "tls.key").write_bytes(private)
    (directory / "public").mkdir()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (directory / "public" / "current.pem").write_bytes(public)
    return directory / "tls.key"


@pytest.fixture(scope="module")
def engine(private_key, tmp_path_factory):
    """A replica of the LLMDeployment `tiny`, whose clients call the model `served`, with one adapter."""
    model = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    adapters = tmp_path_factory.mktemp("adapters")
    adapter_files.write(adapters / "sales", model)
    keys = ("--gateway-keys-dir", str(private_key.parent / "public"))
    flags = ("--served-model-name", "served", *keys, "--gateway-audience", f"{NAMESPACE}/tiny")
    flags += ("--max-adapters", "1", "--adapters-dir", str(adapters), "--canary-interval-seconds", "1")
    with Server(model, tmp_path_factory.mktemp("engine"), *flags) as engine:
        engine.wait_ready()
        engine.wait("it has the adapter", lambda: "Ready" in str(engine.statusz()["adapters"]))
        yield engine


def test_only_the_gateway_gets_answers_and_probes_and_metrics_need_no_token(engine):
    for headers in ({}, {"authorization": "Bearer x"}):
        answer = httpx.post(
            engine.url + CHAT, json={**BODY, "model": "served"}, headers=headers, verify=NO_TLS
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "gateway_token_required")
    forged = httpx.post(
        engine.url + CHAT, json=BODY, headers={"x-quire-gateway-token": "a.b.c"}, verify=NO_TLS
    )
    assert (forged.status_code, forged.json()["error"]["code"]) == (401, "invalid_gateway_token")
    for path in ("/health", "/metrics"):
        assert httpx.get(engine.url + path, verify=NO_TLS).status_code == 200
    for path in ("/readyz", "/livez"):
        assert httpx.get(engine.health_url + path, verify=NO_TLS).status_code == 200


def test_a_model_is_asked_for_by_its_deployment_s_name_whatever_the_engine_calls_it(
    start, engine, private_key
):
    gateway = start(slice_of("one", engine), SIGNING_KEY_FILE=private_key)
    mine = {"x-quire-gateway-token": "a.b.c", "authorization": "Bearer mine"}

    answer = httpx.post(
        gateway.url + CHAT, json={**BODY, "model": "tiny"}, headers=mine, timeout=60, verify=NO_TLS
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert gateway.post(CHAT, {**BODY, "model": "served"}).status_code == 404, "the gateway's names count"


def test_a_replica_that_lacks_an_adapter_does_not_answer_by_its_model(start, kube, engine, private_key):
    adapters = [{"name": "sales"}, {"name": "support"}]
    spec = {"model": {"servedName": "served"}, "adapters": adapters}
    kube.put(llm_object("LLMDeployment", "tiny", spec))
    mute = endpoint_slice("tiny-one", {"one": "127.0.0.1"}, port=engine.port, health_port=engine.port)
    gateway = start(mute, SIGNING_KEY_FILE=private_key)
    answer = gateway.post(CHAT, {**BODY, "model": "sales"})
    assert (answer.status_code, answer.json()["model"]) == (200, "sales")
    answer = gateway.post(CHAT, {**BODY, "model": "support"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_ready")


def test_a_replica_that_refuses_the_gateway_is_the_gateway_s_problem_and_no_client_s(start, engine):
    gateway = start(slice_of("one", engine))
    answer = gateway.post(CHAT, {**BODY, "model": "tiny"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "gateway_refused")


def test_a_gateway_without_the_key_that_it_should_sign_with_does_not_start(kube, tmp_path):
    gateway = Gateway(kube.url, tmp_path, SIGNING_KEY_FILE=tmp_path / "missing")
    assert gateway.process.wait(60) == 2
    assert "missing cannot be read" in gateway.log.read_text()
