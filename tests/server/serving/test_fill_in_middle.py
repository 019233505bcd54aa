"""A completion with a suffix is what the model says after the prompt that its family has for a gap."""

import pytest

from tests.server import tiny_model
from tests.server.conftest import KEY
from tests.server.launch import Server
from tests.server.serving.test_resume import Stream, assert_it_goes_on

PATH = "/v1/completions"
TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"
ASK = {"model": "tiny", "prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A model with Qwen's tokens."""
    directory = tmp_path_factory.mktemp("coder")
    model = tiny_model.write(directory / "tiny", tokens=TOKENS)
    with Server(model, directory) as server:
        yield server.wait_ready()


def ask(server, key=None, **fields):
    answer = server.post(PATH, {**ASK, **fields}, key=key)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def by_hand(text, **fields):
    """The same request, with the prompt written by hand."""
    return {"prompt": f"<|fim_prefix|>{text}<|fim_suffix|>{SUFFIX}<|fim_middle|>", "suffix": None, **fields}


def test_the_answer_is_that_to_the_prompt_of_the_family(coder):
    filled, written = ask(coder), ask(coder, **by_hand(PREFIX))
    assert texts(filled) == texts(written) != texts(ask(coder, suffix=None))
    assert filled["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]
    assert texts(ask(coder, prompt="")) == texts(ask(coder, **by_hand("")))


def test_several_prompts_and_answers_have_the_same_suffix(coder):
    prompts = ["a = ", "b = "]
    fields = {"n": 2, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    written = [by_hand(prompt)["prompt"] for prompt in prompts]
    many = texts(ask(coder, prompt=prompts, **fields))
    assert many == texts(ask(coder, prompt=written, suffix=None, **fields))
    assert len(set(many)) > 2


def test_an_echo_is_the_text_before_the_gap(coder):
    (plain,), (echoed,) = texts(ask(coder)), texts(ask(coder, echo=True))
    assert echoed == PREFIX + plain


def test_log_probabilities_and_stop_strings_are_those_of_the_answer(coder):
    answer = ask(coder, logprobs=2)["choices"][0]
    assert "".join(answer["logprobs"]["tokens"]) == answer["text"]
    stop = answer["text"][4:6]
    assert texts(ask(coder, stop=stop)) == [answer["text"][: answer["text"].index(stop)]]


def test_a_token_that_no_middle_has_ends_it(coder):
    vocabulary = coder.post("/tokenize", {"prompt": "".join(TOKENS), "model": "tiny"}).json()["tokens"]
    for token in vocabulary:
        ended = ask(coder, allowed_token_ids=[token])
        assert (texts(ended), ended["choices"][0]["finish_reason"]) == ([""], "stop")
    plain = ask(coder, suffix=None, allowed_token_ids=vocabulary[-1:])
    endless = ask(coder, ignore_eos=True, allowed_token_ids=vocabulary[-1:])
    assert texts(plain) == texts(endless) == ["<|fim_pad|>" * 12]


def test_a_stream_says_the_same_and_another_replica_goes_on_with_it(coder):
    fields = {**ASK, "ignore_eos": True, "messages": None}
    whole = Stream(coder, PATH, **fields)
    assert whole.text() == texts(ask(coder, ignore_eos=True))[0]
    for number in (1, 6):
        assert_it_goes_on(coder, whole, number, PATH, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": [1, 2]}, "suffix: needs a prompt that is text"),
        ({"prompt": ["a", [1, 2]]}, "suffix: needs a prompt that is text"),
        ({"echo": True, "logprobs": 1}, "suffix: is not supported together with echo and logprobs"),
        ({"suffix": 3}, "suffix: must be a string"),
        ({"suffix": "a" * 5000}, "at most 2047 are taken: shorten the prompt"),
    ],
)
def test_what_cannot_be_filled_in_is_a_400_that_names_the_field(coder, fields, says):
    answer = coder.post(PATH, {**ASK, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"] and error["param"] == "suffix"


def test_a_model_without_such_tokens_refuses_a_suffix_and_takes_an_empty_one(server):
    refused = server.post(PATH, ASK, key=KEY)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"
    assert "no tokens for filling in the middle" in refused.json()["error"]["message"]
    assert texts(ask(server, KEY, suffix="")) == texts(ask(server, KEY, suffix=None))
