"""LoRA adapters as an operator and clients see them: loaded, named as models, dropped, refused."""

import concurrent.futures
import json

import httpx
import pytest

from quire_server.model_dir.adapter_layout import STATE_FOLDER
from tests.server import adapter_files
from tests.server.conftest import ADMIN_KEY, KEY
from tests.server.launch import Server
from tests.server.runner.in_process import InProcessEngine, greedy, load

TEXT = "Once upon a time, in a"
LENGTH = 16


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served-adapters")
    for number in (1, 2, 3):
        adapter_files.write(folder / f"a{number}", tiny, seed=number)
    adapter_files.write(folder / "more" / "dora", tiny, use_dora=True)
    adapter_files.write(folder / "more" / "b", tiny, seed=22)
    return folder


@pytest.fixture(scope="module")
def server(tiny, folder, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys")
    (keys / "client").write_text(KEY)
    (keys / "admin").write_text(f"{ADMIN_KEY}\nadmin: true")
    directory = tmp_path_factory.mktemp("adapters-server")
    flags = ("--max-adapters", "2", "--adapters-dir", str(folder), "--api-keys-dir", str(keys))
    with Server(tiny, directory, *flags) as server:
        server.wait_ready()
        server.wait("adapters", lambda: len(states(server)) == 3)
        yield server


def states(server, state="Ready"):
    return {one["name"] for one in server.statusz()["adapters"] if one["state"] == state}


def change(server, what, key=ADMIN_KEY, **body):
    return server.post(f"/v1/{what}_lora_adapter", body, key=key)


def answer(server, model, **fields):
    body = {"model": model, "prompt": TEXT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", {**body, **fields}, key=KEY)


def text_of(server, model):
    found = answer(server, model)
    assert found.status_code == 200, found.text
    assert found.json()["model"] == model
    return found.json()["choices"][0]["text"]


def test_each_name_is_answered_by_its_adapter_side_by_side(server, tiny, folder, tmp_path):
    names = ["tiny", "a1", "a2", "a3"] * 3
    with concurrent.futures.ThreadPoolExecutor(len(names)) as threads:
        texts = list(threads.map(lambda name: text_of(server, name), names))
    prompt = server.post("/tokenize", {"model": "a1", "prompt": TEXT}, key=KEY).json()["tokens"]
    for index, name in enumerate(names[:4]):
        model = tiny if name == "tiny" else adapter_files.merged(tiny, folder / name, tmp_path / name)
        tokens = InProcessEngine(load(model)).generate([prompt], greedy(LENGTH))[0]
        text = server.post("/detokenize", {"tokens": tokens}, key=KEY).json()["prompt"]
        assert set(texts[index::4]) == {text.replace("<|im_end|>", "").replace("<|im_start|>", "")}
    assert server.metric("llm_adapter_resident", model="tiny") == 2
    assert server.metric("llm_adapter_slot_loads_total", model="tiny") >= 3
    assert server.metric("llm_adapter_requests_total", adapter="a3") >= 3
    idle = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}'
    server.wait("none runs or waits", lambda: idle in httpx.get(server.url + "/metrics").text)
    long = {"model": "a1", "prompt": TEXT, "max_tokens": 300, "stream": True, "temperature": 0}
    with server.client(KEY) as client:
        answer = client.completions.create(**long, extra_body={"ignore_eos": True})
        running = idle.replace('running_lora_adapters=""', 'running_lora_adapters="a1"')
        server.wait("it runs", lambda: running in httpx.get(server.url + "/metrics").text)
        answer.close()


def test_processes_that_share_the_model_answer_as_one(server, tiny, folder, tmp_path):
    flags = ("--max-adapters", "1", "--adapters-dir", str(folder), "--tensor-parallel-size", "2")
    with Server(tiny, tmp_path, *flags).wait_ready() as ranks:
        ranks.wait("adapters", lambda: states(ranks) >= {"a1", "a3"})
        for name in ("a1", "tiny", "a3", "a1"):
            assert text_of(ranks, name) == text_of(server, name)


def test_an_adapter_is_a_model_of_the_list_with_its_parent_and_answers_chats(server):
    with server.client(KEY) as client:
        cards = {card.id: card for card in client.models.list()}
        assert cards["a1"].parent == "tiny" and cards["tiny"].parent is None
        assert client.models.retrieve("a1").id == "a1"
        messages = [{"role": "user", "content": "Hello"}]
        chat = client.chat.completions.create(model="a1", messages=messages, max_tokens=3)
        assert chat.model == "a1"


def test_a_name_is_dropped_while_its_answer_runs_and_loaded_again(server, folder):
    text = text_of(server, "a2")
    asked = {"model": "a2", "prompt": TEXT, "max_tokens": 300, "temperature": 0, "stream": True}
    with server.client(KEY) as client:
        chunks = iter(client.completions.create(**asked, extra_body={"ignore_eos": True}))
        next(chunks)
        assert change(server, "unload", lora_name="a2").status_code == 200
        assert answer(server, "a2").status_code == 404
        last = [chunk for chunk in chunks if chunk.choices][-1]
    assert last.choices[0].finish_reason == "length"
    assert change(server, "unload", lora_name="a2").status_code == 404
    fetched = folder / STATE_FOLDER / "a2.json"  # as fetch-adapters writes it for one of its list
    fetched.parent.mkdir()
    texts = {"name": "a2", "state": "Fetched", "reason": "", "message": "", "revision": ""}
    fetched.write_text(json.dumps({**texts, "bytes": 9, "total_bytes": 9}))
    server.wait("it is said to be unloaded", lambda: states(server, "Unloaded") == {"a2"})
    other = str(folder / "more" / "b")  # other content under the same name
    assert change(server, "load", lora_name="a2", lora_path=other).status_code == 200
    assert text_of(server, "a2") != text
    server.wait("it is said to be ready", lambda: "a2" in states(server))


def test_one_of_many_loads_of_a_new_name_wins_and_every_other_one_is_refused(server):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        paths = ["a1", "a3"] * 4  # "a2" has other weights than its folder by now
        loads = [threads.submit(change, server, "load", lora_name="raced", lora_path=path) for path in paths]
    answers = [load.result() for load in loads]
    (won,) = (path for path, one in zip(paths, answers, strict=True) if one.status_code == 200)
    refused = [one.json()["error"] for one in answers if one.status_code == 400]
    assert len(refused) == 7 and {one["param"] for one in refused} == {"lora_name"}
    assert text_of(server, "raced") == text_of(server, won)
    assert change(server, "unload", lora_name="raced").status_code == 200


def test_directories_that_come_change_and_go_are_followed_without_a_restart(server, folder, tiny):
    adapter_files.write(folder / "later", tiny, seed=5)
    server.wait("it is loaded", lambda: "later" in states(server))
    text = text_of(server, "later")
    adapter_files.write(folder / "later", tiny, seed=6)
    server.wait("its new content", lambda: text_of(server, "later") != text)
    (folder / "later" / "adapter_config.json").unlink()
    server.wait("it is dropped", lambda: "later" not in states(server))
    assert answer(server, "later").status_code == 404


def test_a_broken_adapter_hurts_no_other_and_statusz_has_its_reason(server):
    refused = change(server, "load", lora_name="broken", lora_path="more/dora")
    assert refused.status_code == 400 and "use_dora" in refused.json()["error"]["message"]
    states = {one["name"]: one for one in server.statusz()["adapters"]}
    assert states["broken"]["state"] == "Failed" and "use_dora" in states["broken"]["reason"]
    assert states["a1"]["state"] == "Ready" and states["a1"]["rank"] == 4
    assert answer(server, "broken").status_code == 404
    assert server.metric("llm_adapter_failed", model="tiny") == 1
    text_of(server, "a1")
    assert change(server, "unload", lora_name="broken").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "tiny", "lora_path": "a1"}, "lora_name"),
        ({"lora_name": "a1", "lora_path": "a1"}, "lora_name"),
        ({"lora_name": "-x", "lora_path": "a1"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "../"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a1\0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "."}, "lora_path"),
    ],
)
def test_what_may_not_be_loaded_is_refused_by_its_field(server, body, param):
    refused = change(server, "load", **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert change(server, "load", key=KEY, **body).status_code == 403


def test_the_openapi_document_names_the_adapters(server):
    headers = {"authorization": f"Bearer {KEY}"}
    document = httpx.get(server.url + "/openapi.json", headers=headers).json()
    assert "a1" in json.dumps(document["components"]["schemas"]["ChatCompletionRequest"])
