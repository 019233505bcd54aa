"""Speculative decoding end to end: the same answers in fewer chunks, and its metrics."""

import pytest

from tests.server import tiny_model
from tests.server.launch import Server

ASK = {"model": "tiny", "prompt": "abcabcabcabc", "max_tokens": 60, "ignore_eos": True}
METHODS = {
    "none": [],
    "ngram": ["--speculative-method", "ngram", "--prompt-lookup-min", "1"],
    "draft-model": ["--speculative-method", "draft-model", "--speculative-model"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By method: texts of a greedy and of a drawn answer, their stop, and the counters."""
    directory = tmp_path_factory.mktemp("speculation")
    model = tiny_model.write(directory / "model")
    found = {}
    for method, flags in METHODS.items():
        (directory / method).mkdir()
        own = [*flags, str(model)] if method == "draft-model" else flags
        with Server(model, directory / method, "--dtype", "float32", *own) as server:
            server.wait_ready()
            texts = [
                server.post("/v1/completions", {**ASK, **more}).json()["choices"][0]
                for more in (
                    {"temperature": 0},
                    {"temperature": 0.7, "seed": 5},
                    {"temperature": 0, "logprobs": 2, "max_tokens": 20},
                    {"temperature": 0, "stop": ["zz", "e"], "max_tokens": 40},
                )
            ]
            server.wait("the counters", lambda server=server: server.metric("llm_running_requests") == 0)
            names = ("drafts", "draft_tokens", "accepted_tokens")
            counters = [server.metric(f"llm_spec_decode_{name}_total") for name in names]
            found[method] = texts, counters
    return found


@pytest.mark.deep
@pytest.mark.parametrize("method", ["ngram", "draft-model"])
def test_answers_equal_those_without_speculative_decoding(answers, method):
    plain, drafted = answers["none"][0], answers[method][0]
    for ours, theirs in zip(drafted, plain, strict=True):
        assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"])
    ours, theirs = drafted[2]["logprobs"], plain[2]["logprobs"]
    assert ours["tokens"] == theirs["tokens"] and len(ours["tokens"]) == 20
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-3)


@pytest.mark.deep
@pytest.mark.parametrize("method", ["none", "ngram", "draft-model"])
def test_the_metrics_count_drafts_and_accepted_tokens(answers, method):
    drafts, draft_tokens, accepted = answers[method][1]
    if method == "none":
        assert drafts == draft_tokens == accepted == 0
    else:
        assert 0 < drafts <= draft_tokens and 0 < accepted <= draft_tokens
