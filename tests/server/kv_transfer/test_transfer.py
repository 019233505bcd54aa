"""A transfer over a real socket: what arrives is what was held, or nothing is used."""

import contextlib
import functools
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import pytest

from e2e.ports import free_ports
from quire_server import peer_auth
from quire_server.core import transfer
from quire_server.core.kv_division import Run
from quire_server.core.transfer import RefusedError, TransferError, prefix_digest
from quire_server.fault_injection import Fault, Faults
from quire_server.kv_transfer import client, frames, handshake, shared_memory
from quire_server.kv_transfer.channel import Channel
from quire_server.kv_transfer.client import Producers
from quire_server.kv_transfer.frames import Kind, Prefill
from quire_server.kv_transfer.nixl import Agent, NixlChannel
from quire_server.kv_transfer.shared_memory import SharedMemoryChannel
from tests.server.kv_transfer.fake_server import BLOCK_SIZE, LAYOUT, PIECES, FakeBlocks, FakeProducer

TOKENS = tuple(range(3 * BLOCK_SIZE))
PREFIX = prefix_digest(TOKENS, "salt", BLOCK_SIZE)
WANTED = Prefill(0, "salt", TOKENS)


@pytest.fixture(params=["tcp", "shared_memory", "nixl"])
def producer(tmp_path, request):
    """Every test with a producer holds for each transport."""
    made = []

    def make(**options):
        made.append(FakeProducer(tmp_path, transport=request.param, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@functools.cache
def reader():
    """NIXL of the consumer, for all tests: only the first one in a process takes long to make."""
    return Agent(b"reader")


def consumer(producer, addresses=None, keys_dir=None, layout=LAYOUT):
    choice = ("nixl", reader()) if producer.transport == "nixl" else ()
    return Producers(addresses or [producer.address], keys_dir, layout, *choice)


@contextlib.contextmanager
def connected(producer, keys_dir=None, layout=LAYOUT):
    channel, _ = consumer(producer, keys_dir=keys_dir, layout=layout).connect()
    kinds = {"tcp": Channel, "shared_memory": SharedMemoryChannel, "nixl": NixlChannel}
    assert type(channel) is kinds[producer.transport]
    try:
        yield channel
    finally:
        channel.close()


def keys(directory, **entries):
    directory.mkdir()
    for client_name, entry in entries.items():
        (directory / client_name).write_text(entry)
    return directory


def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(("first", "num_pieces"), [(0, PIECES), (1, PIECES), (2, PIECES), (0, 2), (0, 15)])
def test_blocks_arrive_where_they_belong_in_however_many_pieces(producer, first, num_pieces):
    source, target = producer(), FakeBlocks(16, seed=2, num_pieces=num_pieces)
    untouched = target.content(9)
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        places = [5, 3, 8][first:]
        client.read(channel, reference, first, target, places)
    assert [target.content(place) for place in places] == [
        source.blocks.content(block) for block in (1, 2, 3)[first:]
    ]
    assert target.content(9) == untouched


def test_a_block_is_freed_once_it_was_read(producer):
    source = producer()
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        assert source.holds.take_ended() == []
        client.read(channel, reference, 0, FakeBlocks(4, 2), [0, 1, 2])
        assert [hold.block_ids for hold in source.holds.take_ended()] == [(1, 2, 3)]


def test_one_flipped_bit_is_found(producer, tmp_path):
    faults = Faults({"corrupt_kv_transfer": Fault("corrupt_kv_transfer", 2, once=False)}, tmp_path)
    source = producer(faults=faults)
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        with pytest.raises(TransferError, match="block 1 has another checksum"):
            client.read(channel, reference, 0, FakeBlocks(4, 2), [0, 1, 2])


def forged(source, reference, case):
    """A reference as it comes back wrong, and the index from which it is read."""
    if case == "consumed":
        source.holds.confirm(reference)
    elif case == "expired":
        source.now += 31.0
    elif case == "cancelled":
        source.holds.cancel(reference.generation)
    elif case == "freed":
        source.now += 31.0
        source.holds.take_ended()
    elif case == "another incarnation":
        reference = reference._replace(incarnation=os.urandom(16))
    elif case == "another hold":
        reference = reference._replace(generation=os.urandom(16))
    elif case == "another salt":
        reference = reference._replace(prefix=prefix_digest(TOKENS, "other", BLOCK_SIZE))
    return reference, 3 if case == "out of range" else 0


@pytest.mark.parametrize(
    "case",
    ["consumed", "expired", "cancelled", "freed", "another incarnation", "another hold", "another salt",
     "out of range"],
)  # fmt: skip
def test_a_reference_that_names_nothing_is_refused_and_no_byte_of_a_block_is_sent(producer, case):
    source, target = producer(), FakeBlocks(16, seed=2)
    before = [target.content(block) for block in range(16)]
    with connected(source) as channel:
        reference, first = forged(source, client.prefill(channel, WANTED, PREFIX, 60.0), case)
        deadline = time.monotonic() + 60
        channel.send(Kind.READ, frames.pack_read(reference, first), deadline=deadline)
        with pytest.raises(RefusedError):
            channel.receive_block(first, target.pieces(0), deadline=deadline)
    assert [target.content(block) for block in range(16)] == before


def test_a_lease_that_ends_during_the_read_makes_it_fail(producer):
    source = producer()
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        pieces_of = source.blocks.pieces

        def late(block_id):
            source.now = 31.0
            return pieces_of(block_id)

        source.blocks.pieces = late
        with pytest.raises(RefusedError, match="no longer held"):
            client.read(channel, reference, 0, FakeBlocks(4, 2), [0, 1, 2])


def test_a_reference_for_another_prefix_or_of_another_length_is_not_used(producer):
    source = producer()
    with connected(source) as channel, pytest.raises(TransferError, match="another prefix"):
        client.prefill(channel, WANTED, prefix_digest(TOKENS, "other", BLOCK_SIZE), 5.0)
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        with pytest.raises(TransferError, match="holds 3 blocks"):
            client.read(channel, reference, 0, FakeBlocks(4, 2), [0, 1])


def test_blocks_are_freed_when_the_consumer_goes(producer):
    source = producer()
    with connected(source) as channel:
        client.prefill(channel, WANTED, PREFIX, 60.0)
    wait(source.holds.take_ended)


def test_a_consumer_that_goes_while_it_waits_abandons_its_job(producer):
    source = producer(answers=False)
    with connected(source) as channel:
        channel.send(Kind.PREFILL, frames.pack_prefill(WANTED), deadline=time.monotonic() + 60)
        job = source.jobs.get(timeout=60)
    wait(lambda: job.is_abandoned)
    assert source.woken.is_set()


@pytest.mark.parametrize("is_first", [True, False], ids=["before it has gone", "after it has gone"])
def test_blocks_held_for_a_consumer_that_goes_are_freed_at_once(producer, is_first):
    source = producer(answers=False)
    with connected(source) as channel:
        channel.send(Kind.PREFILL, frames.pack_prefill(WANTED), deadline=time.monotonic() + 60)
        job = source.jobs.get(timeout=60)
        if is_first:
            source.finish(job)
    if not is_first:
        wait(lambda: job.is_abandoned)
        source.finish(job)
    wait(source.holds.take_ended)
    assert len(source.holds) == 0


def test_signs_of_life_keep_a_consumer_waiting_for_a_slow_prefill_and_end_with_its_time(
    producer, monkeypatch
):
    monkeypatch.setattr(client, "_SILENCE_SECONDS", 0.6)
    source = producer(answers=False)
    with connected(source) as channel:
        began_at = time.monotonic()
        with pytest.raises(TransferError, match="too long"):
            client.prefill(channel, WANTED, PREFIX, 1.5)
        assert time.monotonic() - began_at >= 1.5


@pytest.mark.parametrize("why", ["the engine failed"])
def test_the_reason_of_a_prefill_that_failed_reaches_the_consumer(producer, why):
    source = producer(answers=False)
    source.finish = None
    with connected(source) as channel:
        channel.send(Kind.PREFILL, frames.pack_prefill(WANTED), deadline=time.monotonic() + 60)
        source.jobs.get(timeout=60).finish(why)
        with pytest.raises(RefusedError, match=why):
            channel.receive(Kind.WAIT, Kind.HELD, deadline=time.monotonic() + 60)


def test_a_frozen_producer_is_given_up_by_the_deadline(monkeypatch):
    monkeypatch.setattr(client, "_SILENCE_SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    frozen = Channel.__new__(Channel)
    frozen._connection = ours
    with theirs, ours:
        with pytest.raises(TransferError, match="too long"):
            client.prefill(frozen, WANTED, PREFIX, 60.0)
        with pytest.raises(TransferError, match="too long"):
            frozen.receive(Kind.WAIT, deadline=time.monotonic())


@pytest.mark.parametrize(
    "noise",
    [
        os.urandom(64),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
        pickle.dumps({"a": 1}),
        frames.header(Kind.READ, 72) + bytes(72),
        frames.header(Kind.PROOF, 96) + bytes(96),
        frames.HEADER.pack(b"QKV\x01", Kind.PROOF, 1 << 31),
        frames.HEADER.pack(b"QKV\x01", 99, 0),
        b"",
    ],
    ids=["random", "http", "pickle", "a read", "no key", "too long", "no kind", "nothing"],
)
def test_who_sends_noise_is_disconnected_and_others_are_served(producer, noise, tmp_path):
    source = producer(keys_dir=keys(tmp_path / "keys", a="secret"))
    with socket.create_connection(source.address, 5) as stranger:
        stranger.sendall(noise)
        if not noise:
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):  # closed with bytes of ours unread
            while stranger.recv(4096):
                pass
    with connected(source, keys_dir=tmp_path / "keys") as channel:
        client.prefill(channel, WANTED, PREFIX, 60.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ({"a": "one", "b": "two"}, {"a": "one\n", "b": "two"}, True),
        ({"a": "one", "b": "two"}, {"a": "one"}, False),
        ({"a": "one"}, {"a": "other"}, False),
        ({"a": "one"}, None, False),
        (None, None, True),
    ],
)
def test_both_sides_need_all_keys_of_the_secret(producer, tmp_path, ours, theirs, is_same):
    source = producer(keys_dir=ours and keys(tmp_path / "ours", **ours))
    directory = theirs and keys(tmp_path / "theirs", **theirs)
    if is_same:
        with connected(source, keys_dir=directory):
            return
    with pytest.raises(TransferError, match="does not have the same key"):
        consumer(source, keys_dir=directory).connect()


class _Recording(Channel):
    """Keeps what was sent."""

    def __init__(self, connection):
        super().__init__(connection)
        self.sent = []

    def send(self, kind, body=b"", *, deadline):
        self.sent.append((kind, body))
        super().send(kind, body, deadline=deadline)


def test_a_proof_that_was_overheard_opens_no_other_connection(producer, tmp_path):
    source, end = producer(keys_dir=keys(tmp_path / "keys", a="secret")), time.monotonic() + 10
    with socket.create_connection(source.address, 5) as connection:
        consumer = _Recording(connection)
        handshake.introduce(consumer, handshake.read_key(tmp_path / "keys"), LAYOUT)
    with socket.create_connection(source.address, 5) as connection:
        stranger = Channel(connection)
        stranger.receive(Kind.CHALLENGE, deadline=end)
        for kind, body in consumer.sent:
            stranger.send(kind, body, deadline=end)
        with pytest.raises(TransferError, match="does not have the same key"):
            stranger.receive(Kind.WELCOME, deadline=end)


def test_a_producer_that_cannot_prove_the_key_is_not_used(tmp_path):
    """It accepts everybody, and would send KV blocks of its own choice."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), 5)
        theirs, liar = Channel(ours), Channel(listener.accept()[0])
        end = time.monotonic() + 60
        challenge = frames.Challenge(bytes(32), bytes(16))
        liar.send(Kind.CHALLENGE, frames.pack_challenge(challenge), deadline=end)
        liar.send(Kind.WELCOME, frames.pack_welcome(frames.Welcome(bytes(32), 0)), deadline=end)
        with pytest.raises(TransferError, match="producer does not have the same key"):
            handshake.introduce(theirs, b"key", LAYOUT)
        for channel in (theirs, liar):
            channel.close()


@pytest.mark.parametrize("make", [lambda path: path / "none", lambda path: keys(path / "empty")])
def test_without_a_key_in_the_secret_nothing_is_transferred(producer, tmp_path, make):
    with pytest.raises(TransferError, match="the key cannot be read|there is no key"):
        consumer(producer(), keys_dir=make(tmp_path)).connect()


def test_servers_of_another_layout_exchange_nothing(producer):
    theirs, ours = b"block_size=16\ndevice=cpu\ndtype=float32", b"block_size=64\ndevice=cuda\ndtype=float32"
    with pytest.raises(
        TransferError, match=r"other KV blocks: block_size 16 and not 64, device cpu and not cuda$"
    ):
        consumer(producer(layout=ours), layout=theirs).connect()


def test_the_producer_with_the_fewest_requests_is_asked_and_a_failed_one_is_left_alone(producer):
    busy, idle = producer(), producer()
    busy.server.load = 3
    producers = consumer(busy, [busy.address, idle.address])
    found = []
    for _ in range(2):
        channel, address = producers.connect()
        channel.close()
        found.append(address)
        producers.failed(address, "")
    assert found == [idle.address, busy.address]
    with pytest.raises(TransferError, match="just failed"):
        producers.connect()


def test_of_all_addresses_of_a_name_the_least_loaded_is_asked(producer, monkeypatch):
    """A headless Service has one name for all prefill pods, on one port."""
    first = producer()
    others = [producer(address=(f"127.0.0.{number}", first.address[1])) for number in (2, 3)]
    resolve, pods = socket.getaddrinfo, [first, *others]
    lists = [resolve(*pod.address, type=socket.SOCK_STREAM) for pod in pods]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **options: (
            sum(lists, []) if host == "prefill" else resolve(host, *more, **options)
        ),
    )
    producers = consumer(first, [("prefill", first.address[1])])

    def asked():
        channel, address = producers.connect()
        channel.close()
        return address

    for idle in pods:
        for pod in pods:
            pod.server.load = 0 if pod is idle else 5
        assert asked() == idle.address
    idle.close()
    wait(lambda: asked() != idle.address)


def test_producers_that_are_not_there_are_named(producer):
    unknown = Producers([("no-such-host.invalid", 1)], None, LAYOUT)
    with pytest.raises(TransferError):
        unknown.connect()
    source = producer()
    source.close()
    with pytest.raises(TransferError, match=rf"port {source.address[1]}: no connection"):
        Producers([source.address], None, LAYOUT).connect()


def test_a_producer_elsewhere_is_read_over_tcp_or_not_at_all_as_the_transport_says(tmp_path):
    near, far = FakeProducer(tmp_path, transport="shared_memory"), FakeProducer(tmp_path)
    for source, transport in ((near, "tcp"), (near, "shared_memory"), (far, "tcp"), (far, "auto")):
        channel, _ = Producers([source.address], None, LAYOUT, transport).connect()
        assert isinstance(channel, SharedMemoryChannel) == (transport == "shared_memory")
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        target = FakeBlocks(4, 2)
        client.read(channel, reference, 0, target, [0, 1, 2])
        assert target.content(2) == source.blocks.content(3)
        channel.close()
    with pytest.raises(TransferError, match="shares no memory"):
        Producers([far.address], None, LAYOUT, "shared_memory").connect()
    for source in (near, far):
        source.close()


def test_a_stranger_at_the_name_of_a_producer_s_memory_is_not_read_and_tcp_is_used(tmp_path):
    """Every process of the network namespace can bind that name."""
    source = FakeProducer(tmp_path)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(shared_memory._name(source.holds.incarnation))
        stranger.listen()
        stranger.settimeout(5)

        def answer():
            with stranger.accept()[0] as connection:
                connection.sendall(bytes(64))

        answered = threading.Thread(target=answer)
        answered.start()
        channel, _ = Producers([source.address], None, LAYOUT, "auto").connect()
        answered.join()
    assert not isinstance(channel, SharedMemoryChannel)
    reference = client.prefill(channel, WANTED, PREFIX, 60.0)
    target = FakeBlocks(4, 2)
    client.read(channel, reference, 0, target, [0, 1, 2])
    assert target.content(2) == source.blocks.content(3)
    channel.close()
    source.close()


def test_a_consumer_cannot_write_to_the_memory_that_it_reads(tmp_path):
    source = FakeProducer(tmp_path, transport="shared_memory")
    with connected(source) as channel, pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(channel._descriptor, b"x", 0)
    source.close()


def test_a_block_beyond_the_producer_s_memory_is_not_used(tmp_path):
    source = FakeProducer(tmp_path, transport="shared_memory")
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        source.blocks.pieces = FakeBlocks(16, 1).pieces  # its mapping ends with the file
        os.ftruncate(source.blocks.descriptor, 0)
        with pytest.raises(TransferError, match="no such block"):
            client.read(channel, reference, 0, FakeBlocks(4, 2), [0, 1, 2])
    source.close()


@pytest.mark.parametrize(
    ("kind", "descriptors", "message"),
    [(Kind.SHARED, [], "shares no memory"), (Kind.PROOF, [0], "something else than its memory")],
)
def test_what_is_no_memory_is_not_attached(kind, descriptors, message):
    ours, theirs = map(SharedMemoryChannel, socket.socketpair())
    body = frames.pack_shared([Run(0, 1, 1)])
    socket.send_fds(theirs._connection, [frames.header(kind, len(body)) + body], descriptors)
    with pytest.raises(TransferError, match=message):
        ours.attach(deadline=time.monotonic() + 60)
    for channel in (ours, theirs):
        channel.close()


@pytest.mark.parametrize("more", [PIECES, -PIECES])
def test_a_shared_block_of_another_size_is_not_used(tmp_path, more):
    source = FakeProducer(tmp_path, transport="shared_memory")
    with connected(source) as channel:
        reference = client.prefill(channel, WANTED, PREFIX, 60.0)
        with pytest.raises(TransferError, match=r"no such block|another size"):
            client.read(channel, reference, 0, FakeBlocks(4, 2, block_bytes=3000 + more), [0, 1, 2])
    source.close()


def test_where_shared_blocks_are_is_said_in_whole_entries():
    with pytest.raises(TransferError, match="wrong length"):
        frames.parse_shared(bytes(7))


def test_a_producer_without_nixl_is_not_read_by_it_and_the_reason_is_given(tmp_path):
    source = FakeProducer(tmp_path)
    with pytest.raises(TransferError, match="does not offer NIXL: give it --kv-transport nixl"):
        Producers([source.address], None, LAYOUT, "nixl", reader()).connect()
    source.close()


def test_nixl_is_imported_by_nothing_but_its_choice():
    code = "import sys, quire_server.kv_transfer.client, quire_server.kv_transfer.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "quire_server.kv_transfer.nixl" in done.stdout.split()
    assert not [name for name in done.stdout.split() if name.startswith("nixl")]


def test_metadata_that_is_none_is_refused():
    with pytest.raises(TransferError, match="cannot use"):
        reader().add_peer(b"none")


def is_closed(stranger, drive):
    drive()
    try:
        return not stranger.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_noise_at_the_ports_of_nixl_is_refused_and_transfers_go_on(tmp_path, monkeypatch):
    """They are those that UCX is given, which a NetworkPolicy opens to few."""
    (first,) = free_ports(1)
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{first}-{first + 7}")
    source, refused = FakeProducer(tmp_path, transport="nixl"), 0
    for port in range(first, first + 8):
        for noise in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64):
            with contextlib.suppress(ConnectionRefusedError):
                stranger = socket.create_connection(("127.0.0.1", port), 5)
                with stranger:
                    stranger.sendall(noise)
                    stranger.setblocking(False)
                    wait(functools.partial(is_closed, stranger, source.server._agent.drive))
                refused += 1
    assert refused == 3
    with connected(source) as channel:
        target = FakeBlocks(4, 2)
        client.read(channel, client.prefill(channel, WANTED, PREFIX, 60.0), 0, target, [0, 1, 2])
        assert target.content(2) == source.blocks.content(3)
    source.close()


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    """A producer with NIXL over TCP, which answers no read until a test sets the event."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # what is in one host's memory is read without the other side
    monkeypatch.setattr(transfer, "_SETUP_SECONDS", 0.3)
    source, resumed = FakeProducer(tmp_path, transport="nixl"), threading.Event()
    drive = source.server._agent.drive
    monkeypatch.setattr(source.server._agent, "drive", lambda: resumed.is_set() and drive())
    yield source, Agent(b"over tcp"), resumed, drive
    source.close()


def test_bytes_that_arrive_after_a_read_was_given_up_reach_no_block(frozen):
    source, agent, resumed, drive = frozen
    producers, target = Producers([source.address], None, LAYOUT, "nixl", agent), FakeBlocks(4, 2)
    before = [target.content(block) for block in range(4)]
    channel, _ = producers.connect()
    reference = client.prefill(channel, WANTED, PREFIX, 60.0)
    with pytest.raises(TransferError, match="too long"):
        client.read(channel, reference, 0, target, [0, 1, 2])
    ((_, abandoned),) = agent._unfinished
    assert bytes(abandoned.memory) != source.blocks.content(1)

    resumed.set()

    def has_arrived():
        drive()
        agent.drive()
        return bytes(abandoned.memory) == source.blocks.content(1)

    wait(has_arrived)
    assert [target.content(block) for block in range(4)] == before
    channel.close()
    channel, _ = producers.connect()
    client.read(channel, client.prefill(channel, WANTED, PREFIX, 60.0), 0, target, [0, 1, 2])
    assert target.content(2) == source.blocks.content(3)
    assert agent._staged == [abandoned], "it is used again, once the read has ended"
    channel.close()


def test_a_producer_with_all_transfers_that_it_may_have_says_so_and_is_well(producer, monkeypatch):
    monkeypatch.setattr("quire_server.kv_transfer.server.MAX_TRANSFERS", 1)
    source = producer()
    with connected(source) as first:
        client.prefill(first, WANTED, PREFIX, 60.0)
        with connected(source) as second, pytest.raises(RefusedError, match="takes no more"):
            client.prefill(second, WANTED, PREFIX, 60.0)


def test_strangers_who_say_nothing_keep_no_consumer_out(producer, tmp_path):
    source = producer(keys_dir=keys(tmp_path / "keys", a="secret"))
    strangers = [socket.create_connection(source.address, 5) for _ in range(peer_auth.MAX_UNPROVED)]
    for stranger in strangers:
        assert stranger.recv(1), "all of them are listened to"
    with connected(source, keys_dir=tmp_path / "keys") as channel:
        client.prefill(channel, WANTED, PREFIX, 60.0)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "body",
    [b"", frames._PREFILL.pack(0, 5) + b"salt", frames._PREFILL.pack(0, 1) + b"\xff" + bytes(4),
     frames._PREFILL.pack(0, 0) + bytes(3)],
)  # fmt: skip
def test_a_prompt_that_is_none_is_refused(body):
    with pytest.raises(TransferError):
        frames.parse_prefill(body)


def test_a_salt_too_long_to_be_sent_is_not_sent():
    with pytest.raises(TransferError, match="too long to be sent"):
        frames.pack_prefill(Prefill(0, "s" * (1 << 17), TOKENS))


def test_a_closed_channel_can_be_interrupted():
    ours, theirs = socket.socketpair()
    channel = Channel.__new__(Channel)
    channel._connection = ours
    theirs.close()
    channel.close()
    channel.interrupt()
    with pytest.raises(TransferError, match="connection failed"):
        channel.receive(Kind.WAIT, deadline=time.monotonic() + 1)
