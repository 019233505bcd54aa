"""What gateways tell each other: signed, bounded, to the pods of their own Service, and never waited for."""

import asyncio
import contextlib
import math
import random
import time

import httpx
import pytest

from e2e.ports import free_port
from quire_gateway import peer_messages
from quire_gateway.peer_messages import MAX_BYTES, MAX_DIGESTS, MessageError, decode, encode, encode_record
from quire_gateway.peers import PATH, TIMEOUT_SECONDS, Outbox, PeerReceiver, Peers, PeerSender
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.router import RequestFacts
from quire_gateway.routing.strategies import router_for
from quire_gateway.settings import Settings
from quire_http.environ import SettingsError
from quire_http.server import HttpServer, listen
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice
from tests.server.launch import NO_TLS

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
MINE = RequestFacts("tiny", ("user", "Python " * 1000))


def table_of(outbox):
    def router(strategy):
        return router_for(strategy, random.Random(1), 7, publish=outbox.publish)

    table = ReplicaTable((NAMESPACE,), 8001, time.monotonic, router)
    table.put(endpoint_slice("s", {uid: f"10.0.0.{number}" for number, uid in enumerate("abcdefgh", 1)}))
    return table


def peer(port, name="other", **conditions):
    endpoint = {
        "addresses": ["127.0.0.1"],
        "conditions": {"ready": True} | conditions,
        "targetRef": {"uid": name, "name": name},
    }
    body = endpoint_slice(f"gateways-{name}", {name: endpoint}, service="quire-gateway-peers")
    body["ports"] = [{"name": "peers", "port": port}, {"name": "http", "port": 8080}]
    return body


@contextlib.asynccontextmanager
async def receiving(table, key=KEY):
    """The port of a gateway for peers."""
    listener = listen("127.0.0.1", 0)
    server = HttpServer(
        PeerReceiver(table, key), listener, max_connection_age=math.inf, on_refusal=lambda: None
    )
    serving = await server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await serving


@contextlib.asynccontextmanager
async def sending(peers, outbox, key=KEY):
    task = asyncio.create_task(PeerSender(peers, outbox, key).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition, seconds=120.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)  # a poll of the condition


def test_what_one_gateway_chose_another_one_expects():
    async def scenario():
        outbox = Outbox()
        mine, others = table_of(outbox).at((NAMESPACE, "tiny")), table_of(Outbox())
        theirs = others.at((NAMESPACE, "tiny"))
        peers = Peers("me")
        async with receiving(others) as port, sending(peers, outbox):
            peers.put(peer(port))
            choice = mine.router().pick(MINE, mine.candidates(()), 0.0)
            await eventually(lambda: theirs.router().index.match(choice.digests).masks)
            match = theirs.router().index.match(choice.digests)
            uid = choice.replica.endpoint.uid
            assert match.depth(theirs.router().index.bit(uid)) == len(choice.digests)
            found = theirs.router().pick(MINE, theirs.candidates(()), 0.0)
            assert (found.replica.endpoint.uid, found.num_known) == (uid, len(choice.digests))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "message", "status"),
    [
        (PATH, b"", 400),
        (PATH, encode([encode_record("a", [1])], OTHER_KEY), 400),
        (PATH, encode([encode_record("a", [1])[:-1]], KEY), 400),
        (PATH, encode([bytes(2 * MAX_BYTES)], KEY), 400),
        (PATH, encode([encode_record("unknown", [1])], KEY), 204),
        ("/v1/models", b"", 404),
    ],
)
def test_what_is_no_message_of_a_gateway_changes_nothing(path, message, status):
    async def scenario():
        table = table_of(Outbox())
        async with receiving(table) as port, httpx.AsyncClient(verify=NO_TLS) as client:
            answer = await client.post(f"http://127.0.0.1:{port}{path}", content=message)
            assert answer.status_code == status
            assert len(table.at((NAMESPACE, "tiny")).router().index) == 0

    asyncio.run(scenario())


async def test_a_flood_of_forged_messages_is_a_line_of_the_log_now_and_then(monkeypatch, caplog):
    async def flood(number):
        for _ in range(number):
            answer = await client.post(f"http://127.0.0.1:{port}{PATH}", content=b"forged")
            assert answer.status_code == 400

    async with receiving(table_of(Outbox())) as port, httpx.AsyncClient(verify=NO_TLS) as client:
        await flood(20)
        assert len(caplog.messages) == 1
        monkeypatch.setattr("quire_gateway.peers.SAY_SECONDS", 0.0)
        await flood(1)
    assert "dropped: 20;" in caplog.messages[-1], "none is left out of the count"


async def test_a_message_whose_end_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr("quire_gateway.peers.TIMEOUT_SECONDS", 0.05)
    outbox = Outbox()
    async with receiving(table_of(outbox)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: peer\r\ncontent-length: 100\r\n\r\nonly this"
        writer.write(head.encode())
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()


def test_a_message_comes_back_as_it_was_and_no_prompt_fills_it():
    records = [
        encode_record("a", [1, 2**64 - 1]),
        encode_record("b", range(1000)),
        encode_record("x" * 65, [1]),
    ]
    (one, two) = decode(encode(records, KEY), KEY)
    assert one == ("a", (1, 2**64 - 1))
    assert two == ("b", tuple(range(MAX_DIGESTS)))


def test_any_change_of_a_message_is_noticed():
    message, chance = encode([encode_record("a", [1, 2, 3])], KEY), random.Random(2)
    for _ in range(200):
        changed = bytearray(message)
        changed[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
        with pytest.raises(MessageError):
            decode(bytes(changed), KEY)


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x01\xff\xffa", b"\x01\x00\x00\xff", b"\x02\x01\x00aa"])
def test_signed_records_that_cannot_be_are_refused(body):
    with pytest.raises(MessageError):
        decode(peer_messages.encode([body], KEY), KEY)


def test_the_newest_choices_are_sent_where_not_all_fit():
    outbox = Outbox()
    for number in range(10_000):
        outbox.publish("a", [number])
    size = len(encode_record("a", [1]))
    taken = outbox.take(3 * size)
    assert taken == [encode_record("a", [number]) for number in (9997, 9998, 9999)]
    assert outbox.take(3 * size) == []


def test_peers_are_the_ready_pods_of_the_service_without_this_one():
    peers = Peers("me")
    for body in (peer(1, "one"), peer(2, "two"), peer(3, "me"), peer(4, "four", ready=False)):
        peers.put(body)
    assert peers.urls() == {f"http://127.0.0.1:{port}{PATH}" for port in (1, 2)}
    peers.remove(peer(1, "one"))
    assert peers.urls() == {f"http://127.0.0.1:2{PATH}"}
    peers.replace([peer(5, "five")], NAMESPACE)
    assert peers.urls() == {f"http://127.0.0.1:5{PATH}"}


def test_a_peer_that_is_away_or_never_answers_gets_no_second_message_meanwhile_and_others_get_theirs():
    async def scenario():
        outbox, accepted = Outbox(), []

        async def hang(reader, writer):
            accepted.append(writer)
            await reader.read()

        hung = await asyncio.start_server(hang, "127.0.0.1", 0)
        table, peers = table_of(Outbox()), Peers("me")
        index = table.at((NAMESPACE, "tiny")).router().index
        started = time.monotonic()
        async with receiving(table) as port, sending(peers, outbox):
            peers.put(peer(port))
            peers.put(peer(hung.sockets[0].getsockname()[1], "hung"))
            peers.put(peer(free_port(), "away"))
            for number in range(3):
                outbox.publish("a", [number + 1])
                await eventually(lambda wanted=number + 1: len(index) == wanted)
            assert len(accepted) <= 1 + int((time.monotonic() - started) / TIMEOUT_SECONDS)
        for writer in accepted:
            writer.close()
            await writer.wait_closed()
        hung.close()
        await hung.wait_closed()

    asyncio.run(scenario())


def test_gateways_that_talk_need_a_seed_in_common():
    environ = {"POD_NAMESPACE": "x", "KUBERNETES_SERVICE_HOST": "h", "QUIRE_GATEWAY_PEER_SERVICE": "peers"}
    with pytest.raises(SettingsError, match="QUIRE_GATEWAY_SEED"):
        Settings.from_environ(environ)
    one, other = (Settings.from_environ(environ | {"QUIRE_GATEWAY_SEED": "s"}) for _ in range(2))
    assert one.seed == other.seed
    assert "seed" not in repr(one)
