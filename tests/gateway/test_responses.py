"""OpenAI's Responses through the gateway: what goes on with a response goes to the replica that keeps it."""

import hashlib
import json

import httpx
import openai
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import llm_object
from tests.server.launch import NO_TLS

PATH = "/v1/responses"
ASK = {"model": "tiny", "input": "Once upon a time", "max_output_tokens": 20, "temperature": 0}
BODY = {**ASK, "ignore_eos": True}
SORRY = 'Please ask again "later".'


def asked(**fields):
    """A request as openai-python takes it."""
    return {**ASK, "extra_body": {"ignore_eos": True}, **fields}


def events(answer):
    """The data of each event, which agrees with its name; numbered without a gap."""
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


@pytest.fixture
def routed(start, engines, proxy, kube):
    """A gateway with a route to a replica behind the proxy, with a text as its fallback."""
    rules = [{"targets": [{"deployment": "tiny"}]}]
    spec = {"models": ["chat"], "rules": rules, "fallbacks": [{"canned": SORRY}]}
    kube.put(llm_object("LLMRoute", "r", spec))
    return start(slice_of("one", engines[0], proxy.port))


def test_a_conversation_goes_on_at_the_replica_that_keeps_it_and_its_tokens_are_counted(shared):
    before, chains = len(shared.requests()), []
    with shared.client() as client:
        lines = []
        while {line["replicas"][0] for line in lines} != {"one", "two"}:
            number = len(chains)
            assert number < 24, "every conversation is at one replica"
            first = client.responses.create(**asked(input=f"{number} upon a time"))
            second = client.responses.create(**asked(previous_response_id=first.id))
            assert second.usage.input_tokens > first.usage.input_tokens
            chains.append((first, second))
            lines = shared.wait_requests(2 * len(chains), before)
        for (first, second), one, two in zip(chains, lines[::2], lines[1::2], strict=True):
            assert one["replicas"] == two["replicas"]
            assert one["prompt_tokens"] == first.usage.input_tokens
            assert two["completion_tokens"] == second.usage.output_tokens == 20
        kept = chains[0][0]
        assert client.responses.retrieve(kept.id).output_text == kept.output_text
        items = client.responses.input_items.list(kept.id, limit=1, order="asc")
        assert [item.content[0].text for item in items] == ["0 upon a time"]
        with pytest.raises(openai.BadRequestError, match="after: is the id of no item"):
            client.responses.input_items.list(kept.id, after="x")
        with pytest.raises(openai.BadRequestError, match="response_id: is of a response without background"):
            client.responses.cancel(kept.id)
        client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id: this response is not kept"):
            client.responses.create(**asked(previous_response_id=kept.id))


def test_a_kept_response_may_be_long_and_one_that_is_cut_is_no_whole_one(routed, proxy):
    path = f"{routed.url}{PATH}/resp_{hashlib.sha256(b'one').hexdigest()[:12]}_00"
    body = b'"' + b"x" * (3 << 20) + b'"'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    headers = {"connection": "close"}
    proxy.answer = head + body
    answer = httpx.get(path, headers=headers, timeout=60, verify=NO_TLS)
    assert (answer.status_code, answer.content) == (200, body)
    proxy.answer, proxy.closes = head + body[:-5], True
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(path, headers=headers, timeout=60, verify=NO_TLS)


@pytest.mark.parametrize("response_id", ["resp_0123456789ab_00", "resp_00", "x"])
def test_what_no_replica_keeps_is_refused_by_the_gateway(shared, response_id):
    refused = shared.post(PATH, {**BODY, "previous_response_id": response_id})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "previous_response_not_found")
    assert error["param"] == "previous_response_id" and "whole conversation" in error["message"]
    for method, what in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = httpx.request(method, f"{shared.url}{PATH}/{response_id}{what}", timeout=60, verify=NO_TLS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


def test_a_stream_that_is_cut_ends_with_a_numbered_error_event(routed, proxy):
    whole = events(routed.post(PATH, {**BODY, "model": "chat", "stream": True}))
    assert whole[-1]["type"] == "response.incomplete"
    proxy.cut_after = 4
    found = events(routed.post(PATH, {**BODY, "model": "chat", "stream": True}))
    assert [one["type"] for one in (found[0], found[-1])] == ["response.created", "error"]
    assert found[-1]["code"] == "replica_lost"


def test_a_text_of_the_route_reads_as_any_other_answer_but_never_as_what_was_kept(routed, proxy):
    kept = f"resp_{hashlib.sha256(b'one').hexdigest()[:12]}_00"
    proxy.refuse = True
    with routed.client() as client:
        assert client.responses.create(**asked(model="chat")).output_text == SORRY
        with client.responses.stream(**asked(model="chat")) as stream:
            assert list(stream) and stream.get_final_response().output_text == SORRY
        with pytest.raises(openai.InternalServerError):
            client.responses.create(**asked(model="chat", previous_response_id=kept))
        with pytest.raises(openai.InternalServerError):
            client.responses.retrieve(kept)
