"""/v1/embeddings, /pooling, /v1/score and /v1/rerank of a real server, with a real client library."""

import base64
import json

import httpx
import numpy as np
import pytest
import torch

from tests.server.conftest import KEY
from tests.server.embeddings import embedders
from tests.server.launch import NO_TLS, Server

LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
TEXTS = [LETTERS, "a b", "z y x w v", "q", LETTERS[:21]]


def token_ids(text):
    return [2, *(embedders.WORDS.index(letter) for letter in text.split()), 3]


def expected(directory, text):
    states = embedders.states(directory, token_ids(text)).mean(0)
    return (states / states.norm()).numpy()


def embed(server, **body):
    return server.post("/v1/embeddings", {"model": "tiny", **body}, KEY)


def vectors(response):
    assert response.status_code == 200, response.text
    return np.array([one["embedding"] for one in response.json()["data"]])


def test_openais_client_gets_the_vectors_of_transformers_for_every_kind_of_input(embedder, bert):
    with embedder.client(KEY) as client:
        found = client.embeddings.create(model="tiny", input=TEXTS)  # it asks for base64
        given = (TEXTS[0], token_ids(TEXTS[0]), [token_ids(TEXTS[0])])
        plain = [client.embeddings.create(model="tiny", input=one, encoding_format="float") for one in given]
    assert [one.index for one in found.data] == list(range(len(TEXTS)))
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(token_ids(t)) for t in TEXTS)
    for one, text in zip(found.data, TEXTS, strict=True):
        assert np.abs(np.array(one.embedding) - expected(bert, text)).max() <= 1e-4
    for one in plain:
        assert np.allclose(one.data[0].embedding, found.data[0].embedding, atol=1e-5)


def test_a_request_of_more_inputs_than_a_batch_has_rows_is_answered_in_its_order(embedder):
    inputs = [token_ids(text) for text in TEXTS]
    alone = vectors(embed(embedder, input=inputs))
    many = vectors(embed(embedder, input=inputs * 20))
    assert np.allclose(many, np.tile(alone, (20, 1)), atol=1e-5)


def test_base64_is_the_vector_as_little_endian_float32(embedder):
    numbers = vectors(embed(embedder, input="a b"))[0]
    text = embed(embedder, input="a b", encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(text), "<f4"), numbers.astype("<f4"))


def test_dimensions_shorten_a_vector_and_more_than_the_model_has_are_refused(embedder):
    whole, short = (vectors(embed(embedder, input="a b", **more))[0] for more in ({}, {"dimensions": 4}))
    assert np.allclose(short, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-5)
    refused = embed(embedder, input="a b", dimensions=33)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "dimensions" and "32" in refused.json()["error"]["message"]


def test_a_longer_input_than_the_model_takes_is_refused_or_truncated_where_that_is_asked_for(embedder):
    long = " ".join(["a"] * 95)  # 97 tokens with those around it
    for given in (long, [4] * 97):
        refused = embed(embedder, input=given)
        assert refused.status_code == 400 and "96" in refused.json()["error"]["message"]
    whole = vectors(embed(embedder, input=" ".join(["a"] * 94)))
    assert np.allclose(vectors(embed(embedder, input=long, truncate_prompt_tokens=-1)), whole, atol=1e-5)
    short = vectors(embed(embedder, input="a b c", truncate_prompt_tokens=3))
    assert np.allclose(short, vectors(embed(embedder, input="a")), atol=1e-5)
    refused = embed(embedder, input="a", truncate_prompt_tokens=97)
    assert refused.status_code == 400 and "between 1 and 96" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[4], "a", [64]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "stream": True}, "stream"),
        ({}, "input"),
    ],
)
def test_a_wrong_field_is_named(embedder, body, param):
    refused = embed(embedder, **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_pooling_has_the_same_vectors_in_vllms_shape(embedder):
    answer = embedder.post("/pooling", {"model": "tiny", "input": TEXTS}, KEY).json()
    assert [one["object"] for one in answer["data"]] == ["pooling"] * len(TEXTS)
    assert np.allclose([one["data"] for one in answer["data"]], vectors(embed(embedder, input=TEXTS)))


def test_an_embedder_scores_pairs_by_the_cosine_of_their_vectors(embedder):
    one, *others = vectors(embed(embedder, input=TEXTS))
    answer = embedder.post(
        "/v1/score", {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[1:]}, KEY
    ).json()
    assert np.allclose(
        [pair["score"] for pair in answer["data"]], [one @ other for other in others], atol=1e-5
    )
    lists = {"text_1": TEXTS[:2], "text_2": TEXTS[:3]}
    refused = embedder.post("/v1/score", {"model": "tiny", **lists}, KEY)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text_1"


def test_rerank_lists_the_best_documents_first(embedder):
    body = {"model": "tiny", "query": TEXTS[0], "documents": TEXTS, "top_n": 3}
    answer = embedder.post("/v1/rerank", body, KEY).json()
    scores = [one["relevance_score"] for one in answer["results"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 0 and scores[0] == pytest.approx(1, abs=1e-5)
    assert answer["results"][0]["document"] == {"text": TEXTS[0]}
    bare = embedder.post("/v1/rerank", body | {"return_documents": False}, KEY).json()
    assert "document" not in bare["results"][0]
    for field in ("documents", "text_2"):
        empty = {"query": "a", "documents": []} if field == "documents" else {"text_1": "a", "text_2": []}
        path = "/v1/rerank" if field == "documents" else "/v1/score"
        refused = embedder.post(path, {"model": "tiny", **empty}, KEY)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_a_cross_encoder_scores_pairs_as_transformers_does(scorer, reranker):
    pairs = [(TEXTS[1], text) for text in TEXTS]
    answer = scorer.post("/v1/score", {"model": "tiny", "text_1": TEXTS[1], "text_2": TEXTS}).json()
    for one, (first, second) in zip(answer["data"], pairs, strict=True):
        head, tail = token_ids(first), token_ids(second)[1:]
        raw = embedders.score(reranker, head + tail, [0] * len(head) + [1] * len(tail))
        assert one["score"] == pytest.approx(torch.sigmoid(raw).item(), abs=1e-4)
    ranked = scorer.post("/v1/rerank", {"model": "tiny", "query": TEXTS[1], "documents": TEXTS}).json()
    by_index = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    assert by_index == pytest.approx({one["index"]: one["score"] for one in answer["data"]}, abs=1e-6)


def test_a_cross_encoder_has_no_vectors_and_truncates_the_second_text_of_a_pair(scorer):
    refused = scorer.post("/v1/embeddings", {"model": "tiny", "input": "a"})
    assert refused.status_code == 400 and "/v1/score" in refused.json()["error"]["message"]
    long, most = (" ".join(["a"] * count) for count in (200, 90))  # [CLS] b c [SEP], and [SEP] at the end
    body = {"model": "tiny", "text_1": "b c d"}
    assert scorer.post("/v1/score", body | {"text_2": long[:185]}).status_code == 400
    cut = scorer.post("/v1/score", body | {"text_2": long[:187], "truncate_prompt_tokens": -1}).json()
    whole = scorer.post("/v1/score", body | {"text_2": most}).json()
    assert cut["data"][0]["score"] == pytest.approx(whole["data"][0]["score"], abs=1e-6)
    # Also where one text alone is longer than the model takes.
    cut = scorer.post("/v1/score", body | {"text_2": long, "truncate_prompt_tokens": -1}).json()
    assert cut["data"][0]["score"] == pytest.approx(whole["data"][0]["score"], abs=1e-6)
    wrong = scorer.post("/v1/score", body | {"text_2": "a", "truncate_prompt_tokens": 0})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_path_of_generation_names_the_task_of_the_server(embedder, path):
    refused = embedder.post(path, {}, KEY)
    assert refused.status_code == 404 and "--task embed" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling"])
def test_a_path_of_embeddings_names_the_task_of_a_server_that_generates(server, path):
    refused = server.post(path, {}, KEY)
    assert refused.status_code == 404 and "--task generate" in refused.json()["error"]["message"]


def test_health_metrics_and_status_are_those_of_any_server(embedder):
    asked = embedder.metric("llm_requests_total", status="success")
    tokens = embedder.metric("llm_prompt_tokens_total")
    embed(embedder, input=["a b", "c"])
    assert embedder.metric("llm_requests_total", status="success") == asked + 1
    assert embedder.metric("llm_prompt_tokens_total") == tokens + 7
    assert embedder.metric("llm_active_requests") == 0
    deep = httpx.get(
        f"{embedder.url}/health?deep=true", headers={"authorization": f"Bearer {KEY}"}, verify=NO_TLS
    )
    assert deep.status_code == 200 and deep.json()["status"] == "healthy", deep.text
    status = embedder.statusz()
    assert status["canary"]["tokens"] and status["effective"]["maxModelLen"] == 96


def test_a_server_with_another_golden_vector_does_not_start(bert, embedder, tmp_path):
    canary = embedder.statusz()["canary"]
    golden = tmp_path / "golden.json"
    damaged = [number + 500 for number in canary["tokens"]]
    golden.write_text(json.dumps([canary | {"tokens": damaged, "pod": "other"}]))
    flags = ("--task", "embed", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    with Server(bert, tmp_path, *flags, "--canary-golden-path", str(golden)) as server:
        assert server.wait_end() != 0
        assert server.failure()["reason"] == "CanaryMismatch"


def test_a_weight_that_is_damaged_while_it_serves_fails_requests(bert, tmp_path):
    with Server(bert, tmp_path, "--task", "embed", fault="nan_weight:after=1") as server:
        server.wait_ready()
        answers = [server.post("/v1/embeddings", {"model": "tiny", "input": "a"}) for _ in range(4)]
        assert answers[-1].status_code == 500
        server.wait_fault("nan_weight")


def test_an_input_that_is_not_computed_in_time_is_refused_and_says_when_to_come_back(bert, tmp_path):
    flags = ("--task", "embed", "--request-timeout-seconds", "1")
    with Server(bert, tmp_path, *flags, fault="stuck_step:after=3") as server:
        server.wait_ready()
        answers = (server.post("/v1/embeddings", {"model": "tiny", "input": "a"}) for _ in range(5))
        refused = next(answer for answer in answers if answer.status_code != 200)
        server.wait_fault("stuck_step")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
