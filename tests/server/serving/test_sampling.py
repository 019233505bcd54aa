"""The sampling fields on a real server; transformers computes the expected prompt logprobs."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from quire_server.__main__ import run
from quire_server.text.tokenizer import Tokenizer
from tests.server.conftest import KEY
from tests.server.launch import Server

PROMPT = "Once upon a time there was a prompt of more than one block. "
PRINTABLE = [*range(32, 127)]


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.load(tiny)


def ask(server, key=KEY, **fields):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", {**body, **fields}, key=key)


def choice(server, **fields):
    response = ask(server, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.fixture(scope="module")
def oracle(tiny, tokenizer):
    """Log-probabilities after each token of the prompt."""
    with torch.inference_mode():
        ids = torch.tensor([tokenizer.encode(PROMPT)])
        return LlamaForCausalLM.from_pretrained(tiny)(ids).logits[0].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echoed_prompt_has_the_logprobs_of_transformers(server, tokenizer, oracle, max_tokens):
    ids = tokenizer.encode(PROMPT)
    ask(server)  # a cached prompt must have all its logprobs
    for prompt in (PROMPT, ids):
        answer = ask(server, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens).json()
        (one,) = answer["choices"]
        logprobs = one["logprobs"]
        assert one["text"].startswith(PROMPT)
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        assert "".join(logprobs["tokens"]) == one["text"]
        assert logprobs["text_offset"] == [
            len("".join(logprobs["tokens"][:position])) for position in range(len(logprobs["tokens"]))
        ]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        for position, token in enumerate(ids[1:]):
            value, top = logprobs["token_logprobs"][position + 1], logprobs["top_logprobs"][position + 1]
            assert value == pytest.approx(oracle[position, token].item(), abs=1e-4)
            assert max(top.values()) == pytest.approx(oracle[position].max().item(), abs=1e-4)
            assert (value == max(top.values())) == (oracle[position].argmax().item() == token)


def test_with_echo_the_logprobs_include_the_eos_token_that_ends_the_answer(server, tokenizer):
    ids, (end,) = tokenizer.encode(PROMPT), tokenizer.eos_token_ids
    ended = {"ignore_eos": False, "logit_bias": {str(end): 100}, "logprobs": 1}
    one = choice(server, echo=True, max_tokens=1, **ended)
    assert (one["text"], one["finish_reason"]) == (PROMPT, "stop")
    assert len(one["logprobs"]["token_logprobs"]) == len(ids) + 1
    assert choice(server, **ended)["logprobs"]["tokens"] == []


def test_prompt_logprobs_have_vllm_s_format_on_both_routes(server, tokenizer, oracle):
    ids = tokenizer.encode(PROMPT)
    logprobs = choice(server, prompt_logprobs=2)["prompt_logprobs"]
    assert len(logprobs) == len(ids)
    assert logprobs[0] is None
    for position, token in enumerate(ids[1:]):
        entry = logprobs[position + 1][str(token)]
        assert entry["logprob"] == pytest.approx(oracle[position, token].item(), abs=1e-4)
        ranks = sorted(one["rank"] for one in logprobs[position + 1].values() if one["rank"])
        assert ranks == [1, 2]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    body = server.post("/v1/chat/completions", {**chat, "prompt_logprobs": 0}, key=KEY).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in server.post("/v1/chat/completions", chat, key=KEY).json()


def test_too_many_logprobs_for_a_prompt_or_an_answer_are_refused(server):
    response = ask(server, prompt=["x" * 1900] * 8, prompt_logprobs=20)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    response = ask(server, n=16, max_tokens=1000, logprobs=20)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


def test_logit_bias_allowed_tokens_bad_words_and_penalties_shape_the_answer(server, tokenizer):
    letters = {letter: tokenizer.encode(letter)[0] for letter in "abc"}
    assert choice(server, logit_bias={str(letters["a"]): 100})["text"] == "a" * 12
    assert set(choice(server, allowed_token_ids=list(letters.values()))["text"]) <= set("abc")
    forced = {str(letters["a"]): 100, str(letters["b"]): 90}
    assert choice(server, logit_bias=forced, bad_words=["a"])["text"] == "b" * 12
    assert "aa" not in choice(server, logit_bias=forced, bad_words=["aa"])["text"]
    punished = choice(server, logit_bias={str(letters["a"]): 5}, frequency_penalty=2, presence_penalty=2)
    assert punished["text"].count("a") < 12


def test_a_request_that_bans_every_token_is_a_400_and_the_next_one_is_answered(server, tokenizer):
    (only,) = tokenizer.encode("a")
    response = ask(server, allowed_token_ids=[only], bad_words=["a"])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")
    assert choice(server)["finish_reason"] == "length"


def failed(server):
    return server.metric("vllm:request_success_total", finished_reason="error")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bad_words": ["aa"], "allowed_token_ids": "a"}, "a"),
        ({"structured_outputs": {"regex": "a{3}b"}, "bad_words": ["b"], "ignore_eos": False}, "aaa"),
        ({"structured_outputs": {"regex": "a{3}"}, "allowed_token_ids": "a", "ignore_eos": False}, "aaa"),
    ],
    ids=["a bad word", "a grammar and a bad word", "a grammar that may not end"],
)
def test_an_answer_without_a_possible_next_token_fails_with_no_token_possible(
    server, tokenizer, fields, said
):
    if "allowed_token_ids" in fields:
        fields = fields | {"allowed_token_ids": tokenizer.encode(fields["allowed_token_ids"])}
    plain, before = choice(server), failed(server)
    answer = ask(server, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "no_token_possible")
    assert "allow more, or ban less" in error["message"]
    *chunks, last, done = ask(server, **fields, stream=True).text.strip().split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"], done) == (error, "data: [DONE]")
    texts = [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == said
    assert choice(server) == plain
    assert server.metric("llm_running_requests") == 0
    assert failed(server) == before + 2


def test_an_equal_bias_on_every_token_changes_nothing(server, tokenizer):
    every = {str(token): -100 for token in range(tokenizer.vocab_size)}
    assert choice(server, logit_bias=every)["text"] == choice(server)["text"]


def test_the_smallest_accepted_repetition_penalty_works(server):
    assert choice(server, repetition_penalty=0.01)["finish_reason"] == "length"
    assert ask(server, repetition_penalty=0.009).json()["error"]["param"] == "repetition_penalty"


def test_stop_reason_names_the_stop_string_or_token_that_ended_the_text(server, tokenizer):
    letters = {str(tokenizer.encode(letter)[0]): bias for letter, bias in (("a", 100), ("b", 99))}
    fields = {"logit_bias": letters, "frequency_penalty": 2}  # a, b, a, b or the like, but never for ever
    full = choice(server, **fields)["text"]
    stop, token = full[2:4], tokenizer.encode(full[0])[0]
    until = full[: full.index(stop)]
    assert choice(server, **fields, stop=stop) | {"logprobs": 0} == {
        "index": 0,
        "text": until,
        "logprobs": 0,
        "finish_reason": "stop",
        "stop_reason": stop,
    }
    assert choice(server, **fields, stop=stop, include_stop_str_in_output=True)["text"] == until + stop
    ended = choice(server, **fields, stop_token_ids=[token])
    assert (ended["text"], ended["stop_reason"]) == ("", token)
    shown = choice(server, **fields, stop_token_ids=[token], include_stop_str_in_output=True)
    assert shown["text"] == full[0]
    assert "stop_reason" not in choice(server, **fields)
    streamed = ask(server, **fields, stop=stop, stream=True).text
    (closing,) = [
        one["choices"][0]
        for line in streamed.split("\n\n")
        if line.startswith("data: {")
        for one in [json.loads(line[6:])]
        if one["choices"][0]["finish_reason"]
    ]
    assert closing["stop_reason"] == stop


def test_stop_strings_wait_for_min_tokens(server, tokenizer):
    fields = {"logit_bias": {str(tokenizer.encode("a")[0]): 100}, "stop": "a"}
    assert choice(server, **fields)["text"] == ""
    assert choice(server, **fields, min_tokens=5)["text"] == "a" * 5


def test_special_tokens_are_shown_on_request(server, tiny, tokenizer):
    (special,) = tokenizer.encode("<|im_start|>")
    fields = {"logit_bias": {str(special): 100}, "max_tokens": 2}
    assert choice(server, **fields)["text"] == ""
    assert choice(server, **fields, skip_special_tokens=False)["text"] == "<|im_start|>" * 2


def test_a_watermark_is_refused_without_a_key(server):
    response = ask(server, watermark=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "watermark")


@pytest.fixture(scope="module")
def marking(tiny, tmp_path_factory):
    """A server that marks the answers that ask for it."""
    directory = tmp_path_factory.mktemp("watermark")
    (directory / "key").write_text("a secret that is long enough\n")
    flags = ("--watermark", "on-request", "--watermark-key-path", str(directory / "key"))
    with Server(tiny, directory, *flags) as server:
        yield server.wait_ready(), directory / "key"


def detected(capsys, tiny, key, path):
    assert run(["detect-watermark", "--model", str(tiny), "--key-path", str(key), str(path)], {}) == 0
    return dict(line.split(": ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.deep
def test_the_detector_finds_watermarked_texts_with_their_key_and_no_others(
    marking, tiny, tokenizer, tmp_path, capsys
):
    server, key = marking
    other = tmp_path / "other-key"
    other.write_text("another secret, as long as the first")
    allowed = sorted({tokenizer.encode(chr(letter))[0] for letter in PRINTABLE})
    fields = {"key": "none", "temperature": 1.5, "max_tokens": 300, "allowed_token_ids": allowed}
    text = tmp_path / "text"
    for seed in range(3):
        text.write_text(choice(server, **fields, seed=seed, watermark=True)["text"])
        found = detected(capsys, tiny, key, text)
        assert found["verdict"] == "watermarked"
        assert float(found["p-value"]) < 1e-5
        assert float(found["green fraction"]) > 0.65
        assert detected(capsys, tiny, other, text)["verdict"] == "not watermarked"
        text.write_text(choice(server, **fields, seed=seed)["text"])
        assert detected(capsys, tiny, key, text)["verdict"] == "not watermarked"


def test_the_detector_exits_with_an_error_for_an_unreadable_key(tiny, tmp_path, capsys):
    code = run(["detect-watermark", "--model", str(tiny), "--key-path", str(tmp_path / "none")], {})
    assert code == 2
    assert "watermark key" in capsys.readouterr().err
