"""Clients that share a server: what one key learns of another's prompts, and what each key may do."""

import contextlib
import http.client
import json
import random
import time

import numpy as np
import pytest

from quire_server.engine.canary import Canary
from tests.server.conftest import ADMIN_KEY
from tests.server.launch import Server

CLIENTS = {
    "alice": "",
    "bob": "",
    "carol": "group: team",
    "dave": "group: team\nhighest-priority: high",
    "key": "group: alice",  # no other name or group gets into alice's prefixes
    "erin": "highest-priority: low",
    "root": "admin: true",
}
PREFIX_TOKENS = 192  # whole blocks of a prompt of 196 tokens
ROUNDS, PROMPT_TOKENS = 400, 600
VOCAB_SIZE = 258  # of the tiny model


def start(tiny, directory, *flags):
    """A server with these clients; the key of each is its name."""
    keys = directory / "keys"
    keys.mkdir()
    for client, settings in CLIENTS.items():
        (keys / client).write_text(f"{client}\n{settings}\n")
    return Server(tiny, directory, "--api-keys-dir", str(keys), *flags)


@pytest.fixture(scope="module")
def shared(tiny, tmp_path_factory):
    with start(tiny, tmp_path_factory.mktemp("shared"), "--scheduling-policy", "priority") as server:
        yield server.wait_ready()


@pytest.fixture
def new_text():
    """Texts of 196 tokens, a byte each, no two with a common beginning."""
    numbers = iter(range(10**6))
    salt = f"{time.monotonic_ns():x}"

    def make():
        return (f"{next(numbers)} {salt} " + "secret " * 28)[:196]

    return make


def cached_tokens(server, client, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = server.post(path, {"model": "tiny", "max_tokens": 2, "temperature": 0, **body}, key=client)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def complete(text, **more):
    return {"prompt": text, **more}


def complete_ids(text, **more):
    return {"prompt": [ord(letter) for letter in text], **more}


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


KINDS = {
    "completion": (complete, {}),
    "completion of token ids": (complete_ids, {}),
    "chat": (chat, {}),
    "completion, n": (complete, {"n": 4, "temperature": 1}),
    "chat, n": (chat, {"n": 4, "temperature": 1}),
    "prompt_logprobs": (complete, {"prompt_logprobs": 1}),
    "chat, prompt_logprobs": (chat, {"prompt_logprobs": 1}),
    "echo with logprobs": (complete, {"echo": True, "logprobs": 1}),
    "cache_salt": (complete, {"cache_salt": "the same"}),
    "pinned": (complete, {"cache_control": {"type": "ephemeral"}}),
    "pinned chat": (chat, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_usage_tells_a_key_what_another_key_asked_and_the_same_key_still_hits(shared, new_text, kind):
    body, more = KINDS[kind]
    salt = {name: value for name, value in more.items() if name == "cache_salt"}
    text, other = new_text(), new_text()
    cached_tokens(shared, "alice", body(text, **more))
    of_an_unknown_text = cached_tokens(shared, "bob", body(other, **more))
    assert cached_tokens(shared, "bob", body(text, **more)) == of_an_unknown_text
    assert cached_tokens(shared, "carol", body(text, **salt)) == 0
    assert cached_tokens(shared, "alice", body(text, **salt)) >= PREFIX_TOKENS


def test_a_guess_that_breaks_off_tells_nothing(shared, new_text):
    for length in (32, 64, 190):
        text = new_text()
        cached_tokens(shared, "alice", complete(text))
        assert cached_tokens(shared, "bob", complete(text[:length].ljust(196, "?"))) == 0


def test_a_completion_does_not_find_another_key_s_chat(shared, new_text):
    messages = chat(new_text())
    cached_tokens(shared, "alice", messages)
    ids = shared.post("/tokenize", messages, key="bob").json()["tokens"]
    assert cached_tokens(shared, "bob", {"prompt": ids}) == 0
    assert cached_tokens(shared, "alice", {"prompt": ids}) >= PREFIX_TOKENS


def test_keys_of_one_group_share_their_prefixes_and_nobody_else_finds_them(shared, new_text):
    text = new_text()
    assert cached_tokens(shared, "carol", complete(text)) == 0
    assert cached_tokens(shared, "dave", complete(text)) == PREFIX_TOKENS
    assert cached_tokens(shared, "alice", complete(text)) == 0


def test_no_name_and_no_cache_salt_reaches_the_prefixes_of_another_key(shared, new_text):
    text = new_text()
    cached_tokens(shared, "alice", complete(text))
    assert cached_tokens(shared, "key", complete(text)) == 0
    for salt in ("alice", "key/alice", "\0", "key/alice\0", "\0key/alice\0"):
        assert cached_tokens(shared, "bob", complete(text, cache_salt=salt)) == 0


@pytest.mark.parametrize(("tier", "num_others"), [("host", 3), ("disk", 9)])
def test_prefixes_on_the_host_and_on_the_disk_are_found_by_their_own_key_only(
    tiny, tmp_path, new_text, tier, num_others
):
    """The device has 24 blocks and the host 64, so that other prompts push this one down."""
    offload = ("--kv-offload-host-bytes", str(256 << 10), "--kv-offload-disk-path", str(tmp_path))
    sizes = ("--num-gpu-blocks-override", "24", "--kv-offload-disk-bytes", str(1 << 20))
    with start(tiny, tmp_path, *offload, *sizes) as server:
        server.wait_ready()
        text = new_text()
        cached_tokens(server, "alice", complete(text))
        for _ in range(num_others):
            cached_tokens(server, "carol", complete(new_text()))
        stored = {"tier": tier, "model": "tiny"}
        server.wait("it is stored", lambda: server.metric("llm_kv_tier_stored_blocks_total", **stored) >= 13)
        assert cached_tokens(server, "bob", complete(text)) == 0
        assert server.metric("llm_kv_tier_loaded_blocks_total", **stored) == 0
        assert cached_tokens(server, "alice", complete(text)) == PREFIX_TOKENS
        assert server.metric("llm_kv_tier_loaded_blocks_total", **stored) > 0


class Client:
    """A connection that is kept, which measures the time to the first token."""

    def __init__(self, server, key):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def seconds(self, prompt):
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True})
        begun = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        response = self._connection.getresponse()
        response.readline()
        seconds = time.perf_counter() - begun
        assert response.status == 200
        response.read()
        return seconds

    def close(self):
        self._connection.close()


def same_distribution(first, second):
    """The p-value of the two-sample Kolmogorov-Smirnov test, by its asymptotic distribution."""
    every = np.sort(np.concatenate([first, second]))
    shares = [np.searchsorted(np.sort(one), every, side="right") / len(one) for one in (first, second)]
    size = np.sqrt(len(first) * len(second) / len(every))
    scaled = (size + 0.12 + 0.11 / size) * np.abs(shares[0] - shares[1]).max()
    terms = np.arange(1, 101)
    return min(1.0, float(2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2))))


@pytest.mark.deep
def test_time_to_first_token_does_not_tell_a_key_what_another_key_asked(shared):
    """Three requests follow alice's prompt in each round, in random order: bob's of that prompt, bob's of an
    unknown one, and alice's own again, which shows that the clock can tell a hit from a miss.
    """
    dice = random.Random(0)
    times = {"guessed": [], "unknown": [], "own": []}
    with contextlib.ExitStack() as stack:
        alice, bob = (
            stack.enter_context(contextlib.closing(Client(shared, key))) for key in ("alice", "bob")
        )
        for _ in range(ROUNDS):
            known, unknown = ([dice.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(2))
            alice.seconds(known)
            asked = {"guessed": (bob, known), "unknown": (bob, unknown), "own": (alice, known)}
            for kind in dice.sample(list(asked), 3):
                client, prompt = asked[kind]
                times[kind].append(client.seconds(prompt))
    assert same_distribution(times["own"], times["unknown"]) < 1e-9, "a hit is faster"
    assert np.median(times["own"]) < np.median(times["unknown"])
    assert same_distribution(times["guessed"], times["unknown"]) > 1e-4


def test_a_key_asks_for_no_higher_priority_than_it_has(shared):
    def status(client, priority):
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 1, "priority": priority}
        answer = shared.post("/v1/completions", body, key=client)
        if answer.status_code == 403:
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
        return answer.status_code

    assert [status("alice", level) for level in (-100, -1, "high")] == [403, 403, 403]
    assert [status("alice", level) for level in ("normal", "low", 100)] == [200, 200, 200]
    assert [status("dave", level) for level in (-100, -11, "high", -10, "low")] == [403, 403, 200, 200, 200]
    assert [status("erin", level) for level in ("high", "normal", "low")] == [403, 200, 200]


def test_only_an_admin_s_key_resets_the_prefix_cache(shared, new_text):
    text = new_text()
    cached_tokens(shared, "alice", complete(text))
    refused = shared.post("/reset_prefix_cache", {}, key="bob")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    assert "admin: true" in refused.json()["error"]["message"]
    assert shared.post("/reset_prefix_cache", {}, key="nobody").status_code == 401
    assert cached_tokens(shared, "alice", complete(text)) == PREFIX_TOKENS
    assert shared.post("/reset_prefix_cache", {}, key="root").status_code == 200
    assert cached_tokens(shared, "alice", complete(text)) == 0


@pytest.mark.deep
def test_one_key_s_pins_leave_room_for_another_key_s(tiny, tmp_path, new_text):
    with start(tiny, tmp_path, "--num-gpu-blocks-override", "128") as server:  # 32 of them may be pinned
        server.wait_ready()
        kept = {"cache_control": {"type": "ephemeral"}}
        for _ in range(6):
            cached_tokens(server, "alice", complete(new_text(), **kept))
        pinned = server.metric("llm_prefix_cache_pinned_blocks", model="tiny")
        text = new_text()
        cached_tokens(server, "bob", complete(text, **kept))
        assert server.metric("llm_prefix_cache_pinned_blocks", model="tiny") > pinned
        assert 0 < pinned <= 16


def test_without_keys_all_clients_are_one_and_only_a_salt_separates_them(keyless, new_text):
    text = new_text()
    cached_tokens(keyless, "anything", complete(text, cache_salt="mine"))
    assert cached_tokens(keyless, "none", complete(text)) == 0
    assert cached_tokens(keyless, "another", complete(text)) == len(text) - 1
    assert cached_tokens(keyless, "none", complete(new_text(), priority=-100)) == 0


def test_no_cache_salt_reaches_the_blocks_of_the_canary(keyless):
    """Which has blocks of its own where they are this small."""
    canary = Canary.for_model(VOCAB_SIZE, 2048)
    request = canary.request(1, 0.0)
    prompt = list(request.prompt_token_ids)
    assert cached_tokens(keyless, "none", {"prompt": prompt, "cache_salt": request.cache_salt}) == 0


def test_without_keys_the_prefix_cache_cannot_be_reset(keyless):
    for key in ("none", ADMIN_KEY):
        assert keyless.post("/reset_prefix_cache", {}, key=key).status_code == 403
