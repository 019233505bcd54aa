"""Chat templates render as in transformers, and hostile ones do no harm."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from quire_server.errors import ChatTemplateError, ModelCorruptError
from quire_server.text.chat import ChatTemplate
from quire_server.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


def model_dir(path: Path, template: str | None) -> Path:
    (path / "config.json").write_text("{}")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def template(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    loaded = ChatTemplate.load(model_dir(tmp_path, request.param))
    yield loaded
    loaded.close()


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:]], ids=["system", "no system"])
def test_the_models_template_gives_what_transformers_gives(
    smollm2: Path, messages: list[dict[str, str]]
) -> None:
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(smollm2)
    template = ChatTemplate.load(smollm2)

    text = template.render(messages)
    template.close()

    assert text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.load(smollm2).encode(text, add_special_tokens=False) == oracle.encode(
        text, add_special_tokens=False
    )


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{{ messages[0].content | tojson }}{{ eos_token }}"], indirect=True
)
def test_special_tokens_and_tojson_are_there(template: ChatTemplate) -> None:
    assert template.render([{"role": "user", "content": 'é"'}]) == '<s>"é\\""</s>'


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}"], indirect=True)
def test_a_refusal_of_the_template_is_the_clients_error(template: ChatTemplate) -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(MESSAGES)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{{ self._TemplateReference__context.environment }}",
]


@pytest.mark.parametrize("template", ESCAPES, indirect=True)
def test_a_template_that_tries_to_escape_gets_nothing(
    template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        text = template.render(MESSAGES)
    except ChatTemplateError:
        text = ""
    assert "class" not in text and "root:" not in text and "object at" not in text
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("template", ["{{ messages[0].content }}"], indirect=True)
def test_the_worker_runs_no_code_of_the_directory_it_is_started_in(
    template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("open('pwned', 'w')")
    monkeypatch.chdir(tmp_path)
    template.close()  # the next rendering starts another worker, here
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("template", ["{{ messages[0].content }}"], indirect=True)
def test_a_worker_that_was_killed_while_idle_costs_no_request(template: ChatTemplate) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    (worker,) = [
        int(pid)
        for pid in children.read_text().split()
        if b"chat_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"


COSTLY = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{% set ns = namespace(s='x' * 1000000) %}"
    "{% for i in range(20) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
}


@pytest.mark.parametrize("template", COSTLY.values(), ids=COSTLY, indirect=True)
def test_a_template_that_costs_too_much_is_ended_and_the_next_render_works(template: ChatTemplate) -> None:
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(ChatTemplateError, match="takes too"):
            template.render(MESSAGES)
        assert time.monotonic() - start < 30


def test_a_template_that_does_not_compile_is_found_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelCorruptError, match="cannot be used"):
        ChatTemplate.load(model_dir(tmp_path, "{% for %}"))


def test_the_error_of_a_model_without_a_template_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        ChatTemplate.load(model_dir(tmp_path, None)).render(MESSAGES)
