"""A request of few bytes makes no pairs of so many tokens that they fill the memory."""

import asyncio
import time
from dataclasses import replace

import pytest

from quire_server.api import pooling
from quire_server.api.protocol import embeddings
from tests.server.api import test_completions
from tests.server.api.test_completions import make_context, post

RERANK = {"model": "m", "query": "q" * 32_000, "documents": ["d"] * 2048}
SCORE = {"model": "m", "text_1": "q" * 32_000, "text_2": ["d"] * 2048}


@pytest.fixture
def context():
    """A cross-encoder with long inputs, whose tokens are characters."""
    made = make_context()
    sizes = {"max_model_len": 8192, "num_blocks": 10**7}
    made.engine.info = replace(test_completions.INFO, pooling="score", **sizes)
    made.tokenizer.encode = lambda text, **_: made.tokenizer.calls.append(text) or [1] * len(text)
    return made


def ask(context, monkeypatch, handle, body):
    path = f"/v1/{handle.__name__}"
    monkeypatch.setitem(test_completions.ROUTES, path, (handle, body))
    return asyncio.run(asyncio.wait_for(post(context, path), 30))


@pytest.mark.parametrize(
    ("handle", "body", "field"), [(pooling.rerank, RERANK, "documents"), (pooling.score, SCORE, "text_2")]
)
def test_a_long_query_beside_many_documents_is_refused_before_anything_is_tokenised(
    context, monkeypatch, handle, body, field
):
    begun = time.monotonic()
    status, answer = ask(context, monkeypatch, handle, body)
    assert status == 400 and answer["error"]["param"] == field
    assert str(embeddings.MAX_PAIR_TOKENS) in answer["error"]["message"]
    assert not context.tokenizer.calls and time.monotonic() - begun < 5


def test_more_tokens_than_their_characters_let_expect_are_refused_before_pairs_are_made(context, monkeypatch):
    monkeypatch.setattr(pooling, "_pair", None)
    body = RERANK | {"query": "q" * 1200}
    status, answer = ask(context, monkeypatch, pooling.rerank, body)
    assert status == 400 and answer["error"]["param"] == "documents"
    assert len(context.tokenizer.calls) == 2, "each text is tokenised once"


def test_a_pair_counts_with_what_the_model_takes_of_it_and_an_embedder_reads_the_query_once():
    rerank = embeddings.RerankRequest.model_validate(RERANK)
    assert embeddings.estimated_tokens(rerank, 512, are_paired=True) == 2048 * 512
    assert embeddings.estimated_tokens(rerank, 512, are_paired=False) == 8000
