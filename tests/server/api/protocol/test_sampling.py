"""The fields that say how a token is chosen: bounds, combinations, and what becomes of bad words."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire_http.errors import ApiError
from quire_server.api.auth import Principal
from quire_server.api.input_processor import MAX_NUMBERS, bad_word_ids, engine_requests
from quire_server.api.protocol.requests import parse_completion
from quire_server.engine.messages import EngineInfo
from quire_server.model_dir.generation_config import SamplingDefaults
from tests.server.api.protocol.test_requests import VOCAB, chat, completion


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("min_p", 1.5),
        ("logit_bias", {str(VOCAB): 2}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"-1": 2}),
        ("logit_bias", {"²": 2}),
        ("logit_bias", {"one": 2}),
        ("logit_bias", [1]),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [VOCAB]),
        ("allowed_token_ids", "1"),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 17),
        ("bad_words", [5]),
        ("watermark", 1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
    ],
)
def test_a_value_out_of_its_bounds_is_a_400_that_names_the_field(field, value):
    for ask in (chat, completion):
        with pytest.raises(ApiError, match=field) as refused:
            ask(**{field: value})
        assert refused.value.body["error"]["param"] == field


def test_what_is_asked_for_is_what_the_engine_hears():
    asked = {
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "allowed_token_ids": [5, 6],
        "stop_token_ids": [7],
        "prompt_logprobs": 3,
    }
    for ask in (chat, completion):
        sampling = ask(**asked, logit_bias={"9": 1, "3": -100}).generation.sampling
        for name, value in asked.items():
            assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value)
        assert sampling.logit_bias == ((3, -100.0), (9, 1.0))
        assert sampling.adjusts_logits
        assert not ask().generation.sampling.adjusts_logits, "a plain request costs nothing"


def test_stop_strings_and_min_tokens_go_together():
    rules = chat(stop="x", min_tokens=3, include_stop_str_in_output=True).generation.text
    assert (rules.stop, rules.min_tokens, rules.include_stop) == (("x",), 3, True)


class Words:
    """A tokenizer that knows letters, and a space before a letter as one token of its own."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(text[1]) + 1000, *map(ord, text[2:])] if text.startswith(" ") else list(map(ord, text))


def test_a_bad_word_is_banned_at_the_beginning_of_a_text_and_after_a_space():
    assert bad_word_ids(["ab", " ab"], Words()) == ((97, 98), (1097, 98))
    with pytest.raises(ApiError, match="bad_words"):
        bad_word_ids(["ab", "  "], Words())


class Letters(Words):
    eos_token_ids = (0,)


def asked_of_the_engine(call, info, prompts=((1, 2),)):
    return engine_requests(
        "x",
        0.0,
        call.generation,
        prompts,
        tokenizer=Letters(),
        info=info,
        default_max_tokens=None,
        grammar=None,
        watermark=False,
        principal=Principal(),
        priority=0,
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"], "min_tokens": 2}, "bad_words"),
        ({"bad_words": ["a", "b"]}, None),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [0, 5], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [0, 97], "bad_words": ["a"], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [0, 97], "bad_words": ["a"]}, None),
        ({"allowed_token_ids": [0], "min_tokens": 1, "ignore_eos": True}, None),
        ({"allowed_token_ids": [97], "bad_words": ["aa"]}, None),
        ({"stop_token_ids": [1, 2], "min_tokens": 1, "vocab_size": 3}, "min_tokens"),
        ({"stop_token_ids": [1], "min_tokens": 1, "vocab_size": 3}, None),
    ],
)
def test_fields_that_leave_no_first_token_are_refused_by_name(fields, named):
    vocab_size = fields.pop("vocab_size", 100)
    call = parse_completion({"model": "m", "prompt": "hi", **fields}, SamplingDefaults(), vocab_size)
    info = EngineInfo(64, vocab_size, 32, 8, 4)
    if named is None:
        assert len(asked_of_the_engine(call, info)) == 1
        return
    with pytest.raises(ApiError) as refused:
        asked_of_the_engine(call, info)
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, named)


@pytest.mark.parametrize(
    "more", [{"stream": True}, {"n": 2}, {"prompt_logprobs": 3}], ids=["stream", "n", "another number"]
)
def test_an_echoed_prompt_has_the_answer_s_log_probabilities_or_the_request_is_refused(more):
    call = completion(echo=True, logprobs=2, max_tokens=0)
    assert (call.scores_prompt, call.generation.sampling.prompt_logprobs) == (True, 2)
    with pytest.raises(ApiError, match="logprobs"):
        completion(echo=True, logprobs=2, **more)


def test_prompt_logprobs_are_for_one_whole_answer():
    assert chat(prompt_logprobs=0).generation.sampling.prompt_logprobs == 0
    for more in ({"stream": True}, {"n": 2}):
        with pytest.raises(ApiError, match="prompt_logprobs"):
            chat(prompt_logprobs=1, **more)


LONG = EngineInfo(max_model_len=131_072, vocab_size=VOCAB, num_blocks=1 << 20, block_size=16, max_num_seqs=64)


@given(st.integers(0, 20), st.integers(1, 16), st.none() | st.integers(1, 131_000))
@example(20, 16, None)
@example(0, 1, 131_000)
def test_no_request_is_told_more_numbers_than_are_kept_of_it(top, answers, max_tokens):
    call = chat(logprobs=True, top_logprobs=top, n=answers, max_tokens=max_tokens)
    if max_tokens is not None and answers * max_tokens * (top + 1) > MAX_NUMBERS:
        most = MAX_NUMBERS // answers // (top + 1)
        with pytest.raises(ApiError, match=f"at most {most} tokens") as refused:
            asked_of_the_engine(call, LONG)
        assert refused.value.body["error"]["param"] == "logprobs"
        return
    lengths = {request.sampling.max_tokens for request in asked_of_the_engine(call, LONG)}
    assert max(lengths) * answers * (top + 1) <= MAX_NUMBERS
    assert max_tokens is None or lengths == {max_tokens}


def test_several_prompts_share_the_numbers_and_nobody_else_is_cut():
    prompts = ((1, 2), (3,))
    call = completion(logprobs=1, max_tokens=MAX_NUMBERS // 4)
    assert len(asked_of_the_engine(call, LONG, prompts)) == 2
    with pytest.raises(ApiError, match="logprobs"):
        asked_of_the_engine(completion(logprobs=1, max_tokens=MAX_NUMBERS // 4 + 1), LONG, prompts)
    (request,) = asked_of_the_engine(chat(), LONG)
    assert request.sampling.max_tokens == 131_070


SMALL = EngineInfo(max_model_len=500, vocab_size=VOCAB, num_blocks=32, block_size=16, max_num_seqs=64)
PROMPT = tuple([1] * 400)


def test_so_many_answers_are_taken_as_have_room_beside_the_blocks_that_they_share():
    shared = replace(SMALL, shares_prompts=True)
    assert len(asked_of_the_engine(chat(n=8, max_tokens=1), shared, [PROMPT])) == 8
    with pytest.raises(ApiError, match="at most n=8"):
        asked_of_the_engine(chat(n=9, max_tokens=1), shared, [PROMPT])


def test_without_a_prefix_cache_each_answer_needs_room_for_its_prompt():
    with pytest.raises(ApiError, match="at most n=1"):
        asked_of_the_engine(chat(n=2, max_tokens=1), SMALL, [PROMPT])
