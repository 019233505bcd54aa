"""A model divided among processes gives the answers of one process to every kind of request, with a draft
model, tiers, pinned prefixes, priorities and a canary.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.serving.conftest import TEMPLATE
from tests.server.serving.test_tools import CHAT as CALLS

LONG = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
BODIES = [
    *({"prompt": f"request {index} " * (3 + 3 * index), **LONG, "logprobs": 1} for index in range(5)),
    {"prompt": "once again and " * 4, **LONG, "logit_bias": {"7": 100}},  # drafts are right
    {"prompt": "upon a time", "echo": True, "logprobs": 2, "max_tokens": 6, "temperature": 0},
    {"prompt": "many", "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 40},
    {"prompt": "formed", "structured_outputs": {"regex": "[ab]{20,30}c"}, "seed": 1, "max_tokens": 60},
    {"prompt": "marked", "watermark": True, "seed": 2, "max_tokens": 40},
    {"prompt": "penalised", **LONG, "presence_penalty": 1.0, "repetition_penalty": 1.2, "priority": "low"},
    {"prompt": "kept " * 12, **LONG, "cache_control": {"type": "ephemeral"}},
    {**CALLS, "tool_choice": "required", "max_tokens": 120},
    {**CALLS, **LONG, "tools": [], "max_tokens": 40, "thinking_token_budget": 7},
]


def flags(tiny, directory):
    key = directory / "key"
    key.write_text("a secret that is long enough\n")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    return (
        *("--dtype", "float32", "--quantization", "none", "--max-model-len", "400"),
        *("--speculative-method", "draft-model", "--speculative-model", str(tiny)),
        *("--num-gpu-blocks-override", "300", "--kv-offload-host-bytes", str(1 << 19)),
        *("--kv-offload-disk-path", str(directory), "--kv-offload-disk-bytes", str(1 << 22)),
        *("--preemption-mode", "swap", "--scheduling-policy", "priority"),
        *("--watermark", "on-request", "--watermark-key-path", str(key)),
        *("--canary-interval-seconds", "1"),
        *("--chat-template", str(template)),
    )


def ask(server, body):
    """(text, why it ended, log-probabilities) of each choice; of a chat the text is all of the message."""
    chat = "messages" in body
    response = server.post("/v1/chat/completions" if chat else "/v1/completions", {"model": "tiny", **body})
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    if chat:
        for call in (call for choice in choices for call in choice["message"].get("tool_calls") or ()):
            del call["id"]
        return [(choice["message"], choice["finish_reason"], []) for choice in choices]
    found = [(choice.get("logprobs") or {}).get("token_logprobs") or [] for choice in choices]
    return [
        (choice["text"], choice["finish_reason"], [value for value in values if value is not None])
        for choice, values in zip(choices, found, strict=True)
    ]


def served(tiny, directory, ranks):
    """(answers to all bodies at once, and again; tokens of the canary)."""
    directory.mkdir()
    more = ("--tensor-parallel-size", str(ranks))
    with Server(tiny, directory, *flags(tiny, directory), *more).wait_ready() as server:
        with ThreadPoolExecutor(len(BODIES)) as pool:
            answers = [pool.submit(ask, server, body) for body in BODIES * 2]
            found = [answer.result() for answer in answers]
        assert server.metric("llm_spec_decode_accepted_tokens_total") > 0
        assert server.metric("llm_prefix_cache_pinned_blocks") > 0
        assert server.probe("readyz") == 200
        return found, server.statusz()["canary"]["tokens"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", tokens=("<think>", "</think>"))


@pytest.mark.deep
def test_every_kind_of_request_gets_the_answer_of_one_process(tiny, tmp_path):
    (expected, canary), (found, its_canary) = (served(tiny, tmp_path / str(n), n) for n in (1, 2))
    assert its_canary == canary
    *_, calls, thought = ([message for message, *_ in each] for each in expected)
    assert calls[0]["tool_calls"] and thought[0]["reasoning_content"] and thought[0]["content"]
    for ours, theirs in zip(found, expected, strict=True):
        assert [one[:2] for one in ours] == [one[:2] for one in theirs]
        for (*_, values), (*_, wanted) in zip(ours, theirs, strict=True):
            assert values == pytest.approx(wanted, abs=1e-3)
