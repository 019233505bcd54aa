"""A batch and a job on a real model server that trusts the gateway, to the same answers as by requests."""

import openai
import pytest

from e2e.ports import free_port
from tests.batch.launch import CHAT, Batch, http_client, line, lines_of, submit, wait, wait_over
from tests.gateway.kube_stub import NAMESPACE, KubeStub, endpoint_slice
from tests.gateway.launch import Gateway
from tests.server import tiny_model
from tests.server.launch import Server


@pytest.fixture
def gateway(keys, tmp_path):
    """Before a server that goes by priorities, with quire-batch beside it."""
    model = tiny_model.write(tmp_path / "tiny")
    trust = ("--gateway-keys-dir", str(keys / "public"), "--gateway-audience", f"{NAMESPACE}/tiny")
    flags = (*trust, "--scheduling-policy", "priority")
    port = free_port()
    environ = {"SIGNING_KEY_FILE": keys / "tls.key", "PUBLIC_KEYS_DIR": keys / "public"}
    with Server(model, tmp_path, *flags) as engine, KubeStub() as kube:
        engine.wait_ready()
        ports = {"port": engine.port, "health_port": engine.health_port}
        kube.put(endpoint_slice("tiny-one", {"one": "127.0.0.1"}, **ports))
        url = f"http://127.0.0.1:{port}"
        with Gateway(kube.url, tmp_path, **environ, BATCH_URL=url) as gateway:
            gateway.wait_replicas(1)
            with Batch(gateway.url, keys, tmp_path / "state", PORT=port) as batch:
                batch.url = url
                batch.wait_ready()
                yield gateway


def test_lines_and_jobs_are_answered_as_requests_are(gateway):
    client = openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", http_client=http_client(), max_retries=0
    )
    bodies = [line(number, temperature=0, max_tokens=5) for number in range(6)]
    too_long = line(6, max_tokens=5, content="x " * 100_000)
    over = wait_over(client, submit(client, *bodies, too_long).id)
    assert over.status == "completed" and over.request_counts.completed == 6
    for given, answered in zip(bodies, lines_of(client, over.output_file_id), strict=True):
        direct = client.chat.completions.create(**given["body"])
        batched = answered["response"]["body"]["choices"][0]["message"]["content"]
        assert batched == direct.choices[0].message.content
    (failed,) = lines_of(client, over.error_file_id)
    assert failed["response"]["status_code"] == 400, "and says so as the server does"

    http = http_client(base_url=gateway.url)
    id_ = http.post("/v1/jobs", json={"endpoint": CHAT, "body": bodies[0]["body"]}).json()["id"]

    def answered():
        return http.get(f"/v1/jobs/{id_}").json()["response"]

    assert wait("the job is answered", answered)["body"]["usage"]["completion_tokens"] == 5
