"""Producer and consumer of KV blocks with real engine cores, and a model whose answer depends on every byte
of the KV cache: what a transfer leaves there is right, or it is not used.
"""

import dataclasses
import mmap
import os
import random
import struct
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire_server.core import transfer
from quire_server.core.kv_division import KVDivision, KVMemory, Run
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult
from quire_server.core.topology import Range
from quire_server.engine import kv_consumer
from quire_server.engine.engine_core import EngineCore
from quire_server.engine.golden_tokens import GoldenTokens
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.engine.kv_consumer import KVConsumer
from quire_server.engine.kv_producer import KVProducer
from quire_server.engine.messages import EngineInfo
from quire_server.engine.proof import ProofOfInference
from quire_server.engine.socket_server import EngineSocket
from quire_server.fault_injection import Faults
from quire_server.health.heartbeat import SharedState
from quire_server.kv_transfer import client, frames, handshake, shared_memory
from quire_server.kv_transfer.client import Producers
from quire_server.kv_transfer.frames import Prefill
from quire_server.kv_transfer.holds import SharedHolds
from quire_server.kv_transfer.nixl import Agent
from quire_server.kv_transfer.server import TransferServer
from quire_server.runner.kv_blocks import HostKVBlocks
from tests.server.core.fake_runner import VOCAB_SIZE, answer, next_token
from tests.server.engine.conftest import FakeGrammars, Stop, StoppableSocket
from tests.server.engine.faulty_link import FaultyLink
from tests.server.engine.peer import Peer, make_request

SIZE, NUM_BLOCKS, ROWS, LENGTH = 4, 64, 8, 120
LIMITS = SchedulerConfig(
    max_num_seqs=ROWS,
    max_num_batched_tokens=48,
    max_model_len=LENGTH,
    num_blocks=NUM_BLOCKS,
    block_size=SIZE,
)
INFO = EngineInfo(LENGTH, VOCAB_SIZE, NUM_BLOCKS, SIZE, ROWS)
LAYERS, HEADS = 2, 2
LAYOUT = b"l" * 32
LEASE = 1.0
SLOT = struct.Struct("<i")


class ByteRunner:
    """Writes each token to its slot of the KV cache, and answers what follows from the slots that it reads. A
    block has two pieces, for the first and the second half of its slots. ``is_shared``: it is in a file.
    """

    max_steps_in_flight = 1
    adapters = None

    def __init__(self, is_shared, num_blocks=NUM_BLOCKS):
        self.grammars = FakeGrammars()
        self.block_bytes = SIZE * SLOT.size
        self.num_computed = 0
        half, stride = self.block_bytes // 2, num_blocks * self.block_bytes // 2
        self.runs = [Run(0, half, half), Run(stride, half, half)]
        self.descriptor = os.memfd_create("test") if is_shared else None
        if self.descriptor is not None:
            os.truncate(self.descriptor, 2 * stride)
        whole = memoryview(mmap.mmap(-1 if self.descriptor is None else self.descriptor, 2 * stride))
        self._memory = [whole[:stride], whole[stride:]]
        self._tokens = {}
        self._tables = {}

    def pieces(self, block_id):
        half = self.block_bytes // 2
        return [memory[block_id * half : (block_id + 1) * half] for memory in self._memory]

    def replicate(self, block_id):
        pass

    def clear(self, block_ids):
        for block_id in block_ids:
            for piece in self.pieces(block_id):
                piece[:] = bytes(len(piece))

    def launch(self, step):
        self._apply(step)
        sampled = []
        for row, start, count, samples in zip(
            step.rows, step.starts, step.num_tokens, step.samples, strict=True
        ):
            self.num_computed += count
            for position in range(start, start + count):
                self._slot(row, position, self._tokens[row][position])
            if samples:
                sampled.append(next_token(self._slot(row, at) for at in range(start + count)))
                self._tokens[row].append(sampled[-1])
        result = StepResult(step.step_id, tuple(sampled))
        return lambda: result

    def _apply(self, step):
        for started in step.started:
            self._tokens[started.row] = list(started.token_ids)
            self._tables[started.row] = list(started.block_ids)
        for row, block_id in step.new_blocks:
            self._tables[row].append(block_id)

    def _slot(self, row, position, token=None):
        at = position % SIZE
        piece = self.pieces(self._tables[row][position // SIZE])[at * 2 // SIZE]
        offset = at % (SIZE // 2) * SLOT.size
        if token is not None:
            SLOT.pack_into(piece, offset, token)
        return SLOT.unpack_from(piece, offset)[0]


class StagedRunner:
    """Computes with a memory that transfers do not reach, and copies between it and theirs. Late: a step is
    copied for and computed when its result is awaited, with another one behind it.
    """

    max_steps_in_flight = 2

    adapters = None

    def __init__(self, is_shared, num_slots):
        self._device, self._host = ByteRunner(False, NUM_BLOCKS), ByteRunner(is_shared, num_slots)
        self.grammars, self.block_bytes = self._device.grammars, self._host.block_bytes
        self.descriptor, self.runs = self._host.descriptor, self._host.runs
        self.pieces, self.replicate, self.clear = self._host.pieces, self._host.replicate, self._host.clear
        self.num_loaded = 0
        self._launched = []

    @property
    def num_computed(self):
        return self._device.num_computed

    def launch(self, step):
        self._launched.append(step)
        return lambda: self._computed(step)

    def _computed(self, step):
        assert self._launched.pop(0) is step
        if (copies := step.copies) is not None:
            assert not copies.spills and not copies.fetches
            self._copy(self._device, self._host, copies.saves)
            self._copy(self._host, self._device, copies.loads)
            self.num_loaded += len(copies.loads)
        return self._device.launch(step)()

    @staticmethod
    def _copy(source, target, pairs):
        for taken, given in pairs:
            for one, other in zip(source.pieces(taken), target.pieces(given), strict=True):
                other[:] = one


class RankedRunner(ByteRunner):
    """As ``tensor`` ranks in each of ``stages``: each writes tokens to its heads and layers in its own
    memory, those of later stages when the result is awaited. What is read is right if it is so on all ranks.
    """

    def __init__(self, tensor, stages):
        self.grammars, self.num_computed = FakeGrammars(), 0
        self.max_steps_in_flight = stages
        layers = tuple(
            Range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages) for stage in range(stages)
        )
        self._division = KVDivision(HEADS, tensor, layers)
        self.descriptor = os.memfd_create("test")
        self._blocks = HostKVBlocks(KVMemory(self._division, NUM_BLOCKS, SIZE * SLOT.size), self.descriptor)
        self.block_bytes, self.runs = self._blocks.block_bytes, self._blocks.runs
        self.pieces, self.replicate, self.clear = (
            self._blocks.pieces,
            self._blocks.replicate,
            self._blocks.clear,
        )
        self._tokens, self._tables = {}, {}

    def launch(self, step):
        self._apply(step)
        rows = zip(step.rows, step.starts, step.num_tokens, step.samples, strict=True)
        work = [
            (self._tokens[row], list(self._tables[row]), range(start, start + count), samples)
            for row, start, count, samples in rows
        ]
        self._compute(0, work)

        def result():
            for stage in range(1, len(self._division.stages)):
                self._compute(stage, work)
            sampled = []
            for tokens, table, computed, samples in work:
                self.num_computed += len(computed)
                if samples:
                    sampled.append(next_token(self._read(table, at) for at in range(computed.stop)))
                    tokens.append(sampled[-1])
            return StepResult(step.step_id, tuple(sampled))

        return result

    def _compute(self, stage, work):
        for rank in range(stage * self._division.tensor, (stage + 1) * self._division.tensor):
            for tokens, table, computed, _ in work:
                for at in computed:
                    for memory, offset, mark in self._places(rank, table, at):
                        SLOT.pack_into(memory, offset, tokens[at] ^ mark)

    def _read(self, table, at):
        found = {
            SLOT.unpack_from(memory, offset)[0] ^ mark
            for rank in range(self._division.num_ranks)
            for memory, offset, mark in self._places(rank, table, at)
        }
        return found.pop() if len(found) == 1 else -1

    def _places(self, rank, table, at):
        """Where a rank has a slot, and what distinguishes each place from the others."""
        memory, layers = self._blocks.of_rank(rank), self._division.layers(rank)
        heads, block_id = self._division.heads(rank), table[at // SIZE]
        for part in range(2 * layers.size):  # keys and values of its layers
            for head in range(heads.size):
                slot = ((part * NUM_BLOCKS + block_id) * heads.size + head) * SIZE + at % SIZE
                yield memory, slot * SLOT.size, (2 * layers.start + part) * HEADS + heads.start + head


class RunningEngine:
    """An engine core of one role, in its thread. ``num_slots``: on the host, if its blocks are staged.
    ``ranks``: how many in a stage, and stages.
    """

    def __init__(self, directory, make_connector, is_shared=False, num_slots=0, ranks=None):
        self.run_dir = directory
        directory.mkdir()
        if ranks is not None:
            self.runner = RankedRunner(*ranks)
        else:
            self.runner = StagedRunner(is_shared, num_slots) if num_slots else ByteRunner(is_shared)
        stages = 1 if ranks is None else ranks[1]
        limits = dataclasses.replace(LIMITS, num_staging_slots=num_slots, pipeline_size=stages)
        self.scheduler = Scheduler(limits, eos_token_ids=())
        self.connector = make_connector(self)
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            info=INFO,
            heartbeat=HeartbeatWriter(SharedState.create(directory), time.monotonic()),
            faults=Faults({}, directory),
            proof=ProofOfInference(3600.0, 60.0, time.monotonic()),
            golden=GoldenTokens(None, "f" * 64),
            connector=self.connector,
        )
        self.core.warm_up()
        self.socket = StoppableSocket(directory, INFO)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        try:
            self.core.serve(self.socket)
        except Stop:
            return

    def stop(self):
        self.socket.stopped = True
        self.thread.join(60)
        self.socket.close()
        if self.runner.descriptor is not None:
            os.close(self.runner.descriptor)

    @property
    def is_free(self):
        kv = self.scheduler.kv
        is_held = kv.has_transfers or kv.stats().host_used
        return not (self.scheduler.has_work or is_held or self.connector.requests())


class Pair:
    """A producer and a consumer; connections between them may fail: those over which blocks are fetched.
    ``staged``: the slots of both, if they compute elsewhere. ``ranks``: of both, if several.
    """

    def __init__(
        self, directory, next_fault=lambda: None, transport="tcp", staged=(0, 0), ranks=(None, None)
    ):
        self.transport = transport
        is_mapped = transport != "tcp"
        self.producer = RunningEngine(directory / "producer", self._producer, is_mapped, staged[0], ranks[0])
        self._peer = Peer(self.producer)
        wait(lambda: hasattr(self, "server"))
        address = ("127.0.0.1", self.server.port)
        is_shared = transport == "shared_memory"
        self.link = FaultyLink(shared_memory._name(self.incarnation) if is_shared else address, next_fault)
        self._address = address if is_shared else self.link.address
        self.consumer = RunningEngine(
            directory / "consumer", self._consumer, num_slots=staged[1], ranks=ranks[1]
        )

    def _producer(self, engine):
        def listen(submit, wake):
            self.server = TransferServer(
                ("127.0.0.1", 0),
                keys_dir=None,
                layout=LAYOUT,
                blocks=engine.runner,
                holds=holds,
                submit=submit,
                wake=wake,
                faults=Faults({}, engine.run_dir),
                agent=agent,
            )
            return self.server

        holds = SharedHolds(LEASE)
        self.incarnation = holds.incarnation
        agent = Agent(holds.incarnation, engine.runner) if self.transport == "nixl" else None
        return KVProducer(engine.scheduler, holds, VOCAB_SIZE, listen)

    def _consumer(self, engine):
        agent = Agent(os.urandom(16)) if self.transport == "nixl" else None
        producers = Producers([self._address], None, LAYOUT, self.transport, agent)
        return KVConsumer(engine.scheduler, producers, engine.runner, 3 * SIZE)

    def ask(self, prompt, number=0, length=12, abort_after=None, **more):
        """The answer of the consumer; None where it is aborted after so many seconds."""
        name = f"request {number}"
        with Peer(self.consumer) as peer:
            peer.connection.settimeout(30)
            peer.send(make_request(name, prompt, length, **more))
            if abort_after is None:
                tokens, event = peer.answer(name)
                assert event.error is None
                return tokens
            time.sleep(abort_after)
            peer.send(aborts=(name,))
            return None

    def assert_free(self, seconds):
        """Both sides have all their blocks within a time."""
        wait(lambda: self.producer.is_free and self.consumer.is_free, seconds)
        for engine in (self.producer, self.consumer):
            engine.scheduler.check()
            assert engine.scheduler.num_unaccounted_blocks == 0
            assert engine.scheduler.kv.num_free == NUM_BLOCKS

    def close(self):
        self.link.close()
        self._peer.connection.close()
        self.server.close()
        for engine in (self.consumer, self.producer):
            engine.stop()


def wait(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


def until_transfers(pair, count, most=50):
    """Ask for new prompts until so many more transfers have succeeded, which a busy machine may delay."""
    start = pair.consumer.connector.stats()
    before = start.succeeded
    for number in range(most):
        prompt = [number % VOCAB_SIZE, *range(40)]
        assert pair.ask(prompt, f"further {number}") == answer(prompt, 12)
        if pair.consumer.connector.stats()[0] >= before + count:
            return
        pair.consumer.connector._producers._avoided.clear()
    raise AssertionError(f"{most} prompts, from {start} to {pair.consumer.connector.stats()}")


@pytest.fixture
def start(tmp_path):
    pairs = []

    def make(**options):
        pairs.append(Pair(tmp_path, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def prompts(seed, count):
    """Some begin alike."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        first = draw.choice(made)[: draw.randrange(1, 40)] if made and draw.random() < 0.4 else []
        made.append([*first, *(draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(3, 60)))])
    return made


def test_a_long_prompt_is_computed_by_the_producer_but_for_its_end(start):
    pair = start()
    before = pair.consumer.runner.num_computed
    prompt = prompts(1, 1)[0] + [7] * 40
    assert pair.ask(prompt) == answer(prompt, 12)
    computed_here = pair.consumer.runner.num_computed - before
    assert computed_here <= SIZE + 12
    assert pair.consumer.connector.stats()[:2] == (1, 0)
    pair.assert_free(5)


def test_short_prompts_and_cached_prefixes_are_not_fetched(start):
    pair = start()
    long = list(range(40))
    assert pair.ask(long, 1) == answer(long, 12)
    assert pair.ask(long, 2) == answer(long, 12)
    assert pair.ask([5] * (3 * SIZE - 1), 3) == answer([5] * (3 * SIZE - 1), 12)
    assert pair.ask([*long, *range(3 * SIZE - 1)], 4) == answer([*long, *range(3 * SIZE - 1)], 12)
    assert pair.consumer.connector.stats()[:2] == (1, 0)
    assert pair.ask(long, 5, cache_salt="another") == answer(long, 12)
    assert pair.consumer.connector.stats()[:2] == (2, 0), "another salt shares nothing"


def test_fetched_tokens_are_not_counted_as_cached_until_another_request_finds_them(start):
    pair, prompt = start(), list(range(41))

    def cached(number, tokens):
        with Peer(pair.consumer) as peer:
            peer.send(make_request(f"request {number}", tokens))
            return peer.answer(f"request {number}")[1].num_cached_tokens

    assert cached(1, prompt) == 0
    assert cached(2, prompt) == 40
    assert cached(3, prompt[:20] + [7] * 20) == 20
    assert pair.consumer.connector.stats()[:2] == (2, 0)


def test_only_what_is_missing_of_a_prefix_is_read(start):
    pair = start()
    assert pair.ask(list(range(40)), 1) == answer(range(40), 12)
    read = pair.consumer.connector.stats().blocks
    longer = [*range(40), *range(20)]
    assert pair.ask(longer, 2) == answer(longer, 12)
    assert pair.consumer.connector.stats().blocks - read <= 20 // SIZE + 1


def test_equal_prompts_at_the_same_time_are_no_failure(start):
    pair, prompt = start(), list(range(40))
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda number: pair.ask(prompt, number), range(12))
        assert all(each == answer(prompt, 12) for each in found)
    assert pair.consumer.connector.stats().failed == 0
    pair.assert_free(5)


def ask_at_once(pair, wanted, aborts=()):
    """The answers to prompts that come in one message, and the first of which may be aborted in it."""
    with Peer(pair.consumer) as peer:
        peer.connection.settimeout(30)
        requests = [make_request(f"request {number}", prompt, 12) for number, prompt in enumerate(wanted)]
        peer.send(*requests, aborts=aborts)
        found = {request.request_id: [] for request in requests if request.request_id not in aborts}
        missing = set(found)
        for event in peer.events():
            found[event.request_id] += event.token_ids
            assert event.error is None
            missing -= {event.request_id} if event.finish_reason is not None else set()
            if not missing:
                return list(found.values())
    raise AssertionError("the connection ended")


def test_equal_prompts_that_come_together_are_fetched_once(start):
    """As the answers of one request, of which there may be more than transfers."""
    pair, prompt = start(), list(range(40))
    count = kv_consumer.MAX_TRANSFERS + 4
    before = pair.consumer.runner.num_computed
    assert ask_at_once(pair, [prompt] * count) == [answer(prompt, 12)] * count
    assert pair.consumer.connector.stats()[:3] == (1, 0, (len(prompt) - 1) // SIZE)
    assert pair.consumer.runner.num_computed - before <= count * (SIZE + 12)
    pair.assert_free(5)


def test_who_waits_for_the_prefix_of_another_request_fetches_it_once_that_one_is_aborted(start):
    pair, prompt = start(), list(range(40))
    assert ask_at_once(pair, [prompt] * 4, aborts=("request 0",)) == [answer(prompt, 12)] * 3
    assert pair.consumer.connector.stats()[:2] == (1, 0)
    pair.assert_free(5)


def test_who_waits_for_the_prefix_of_another_request_fetches_what_is_left_if_that_is_much(start):
    pair, prompt = start(), list(range(40))
    wanted = [prompt, [*prompt, 5, 6, 7], [*prompt, *range(20)], [*prompt[:8], *range(50)]]
    assert ask_at_once(pair, wanted) == [answer(each, 12) for each in wanted]
    assert pair.consumer.connector.stats()[:2] == (3, 0), "the second one finds enough in the prefix cache"
    assert pair.consumer.connector.stats().blocks <= 9 + 5 + 14
    pair.assert_free(5)


def test_equal_prompts_that_no_producer_gives_are_computed_once(start, monkeypatch):
    pair, prompt = start(), [11] * 40
    monkeypatch.setattr(pair.producer.connector, "_vocab_size", 10)
    before = pair.consumer.runner.num_computed
    assert ask_at_once(pair, [prompt] * 6) == [answer(prompt, 12)] * 6
    assert pair.consumer.connector.stats()[:2] == (0, 1)
    assert pair.consumer.runner.num_computed - before <= len(prompt) + 6 * (SIZE + 12)
    pair.assert_free(5)


def test_a_more_urgent_request_waits_for_no_other_one(start):
    pair, prompt = start(), list(range(40))
    connector = pair.consumer.connector
    first = make_request("request 0", prompt)
    connector._transfers["request 0"] = kv_consumer.Transfer(first, tuple(prompt[:36]), 0.0, 1e9)
    for priority, waits in ((0, True), (10, True), (-10, False)):
        request = make_request("request 1", prompt, priority=priority)
        assert (connector._leader(request, tuple(prompt[:36]), 0) is not None) is waits
    assert connector._leader(make_request("request 1", prompt, cache_salt="b"), tuple(prompt[:36]), 0) is None
    connector._transfers.clear()


def test_what_a_producer_refuses_is_computed_here_and_other_prompts_are_still_fetched(start, monkeypatch):
    pair = start()
    monkeypatch.setattr(pair.producer.connector, "_vocab_size", 10)
    assert pair.ask([11] * 30, 1) == answer([11] * 30, 12)
    assert pair.ask([1] * 30, 2) == answer([1] * 30, 12)
    assert pair.consumer.connector.stats()[:2] == (1, 1)
    pair.assert_free(5)


def test_statusz_says_that_prompts_are_computed_here_until_a_transfer_succeeds(start, monkeypatch):
    pair = start()
    state = SharedState.open(pair.consumer.run_dir)
    for prompt, is_degraded in (([11] * 30, True), ([1] * 30, False)):
        with monkeypatch.context() as patch:
            if is_degraded:
                patch.setattr(pair.producer.connector, "_vocab_size", 10)
            pair.ask(prompt)
        wait(lambda wanted=is_degraded: state.read_heartbeat().transfer_degraded is wanted)
    assert pair.consumer.connector.stats()[:2] == (1, 1)


def test_requests_beyond_the_threads_are_computed_here(start, monkeypatch):
    monkeypatch.setattr(kv_consumer, "MAX_TRANSFERS", 0)
    pair = start()
    assert pair.ask(list(range(40))) == answer(range(40), 12)
    assert pair.consumer.connector.stats()[:2] == (0, 0)


def test_blocks_are_written_to_once_no_step_in_flight_can_write_to_them(start, monkeypatch):
    """With stages, a step of a request that was aborted may still compute when its blocks are given away."""
    pair = start()
    scheduler = pair.consumer.scheduler
    monkeypatch.setattr(type(scheduler), "num_committed", -1)  # the oldest one stays in flight
    with Peer(pair.consumer) as peer:
        peer.connection.settimeout(30)
        peer.send(make_request("request 1", list(range(40)), 12))
        wait(lambda: scheduler.kv.has_transfers)
        (fetched,) = pair.consumer.connector._transfers.values()
        before = pair.consumer.connector.stats()
        pair.ask([5] * (3 * SIZE - 1), 2)  # steps of another request
        assert fetched.state is transfer.TransferState.RESERVED
        assert pair.consumer.connector.stats() == before
        monkeypatch.undo()
        pair.ask([5] * (3 * SIZE - 1), 3)
        assert peer.answer("request 1")[0] == answer(range(40), 12)
    assert pair.consumer.connector.stats()[:2] == (1, 0)
    pair.assert_free(5)


def test_steps_are_counted_as_committed_when_their_results_are_here():
    scheduler = Scheduler(dataclasses.replace(LIMITS, pipeline_size=2), eos_token_ids=())
    for number in range(2):
        scheduler.add(make_request(f"request {number}", [1, 2, 3], 5))
    steps = [scheduler.schedule() for _ in range(2)]
    assert (scheduler.num_scheduled, scheduler.num_committed) == (2, 0)
    for number, step in enumerate(steps, start=1):
        scheduler.commit(step, StepResult(step.step_id, (0,) * sum(step.samples)))
        assert (scheduler.num_scheduled, scheduler.num_committed) == (2, number)


def test_a_bug_in_the_thread_of_a_transfer_hangs_no_request(start, monkeypatch):
    has_ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: has_ended.set())
    monkeypatch.setattr(client, "read", None)
    pair = start()
    assert pair.ask(list(range(40))) == answer(range(40), 12)
    assert pair.consumer.connector.stats()[:2] == (0, 1)
    pair.assert_free(5)
    assert has_ended.wait(30)


def test_a_prefix_for_which_there_is_no_room_for_long_is_computed_here(start, monkeypatch):
    monkeypatch.setattr(kv_consumer, "_ROOM_SECONDS", 0.2)
    pair = start()
    monkeypatch.setattr(pair.consumer.scheduler, "reserve_prefix", lambda tokens, salt: None)
    assert pair.ask(list(range(40))) == answer(range(40), 12)
    assert pair.consumer.connector.stats()[:2] == (0, 1)
    pair.assert_free(5)


def test_a_request_that_waits_for_blocks_that_are_held_is_no_stall_and_no_load(start, monkeypatch):
    """A frozen consumer keeps them until the lease ends, which may be longer than a stall may last."""
    monkeypatch.setattr(sys.modules[__name__], "LEASE", 60.0)
    pair = start()
    channels = []
    for number in range(2):  # together nearly all blocks
        channel, _ = Producers([("127.0.0.1", pair.server.port)], None, LAYOUT).connect()
        channels.append(channel)
        tokens = tuple((number + 3 * at) % VOCAB_SIZE for at in range(28 * SIZE))
        prefix = transfer.prefix_digest(tokens, "", SIZE)
        client.prefill(channel, Prefill(0, "", tokens), prefix, 10.0)
    state = SharedState.open(pair.producer.run_dir)
    with Peer(pair.producer) as peer:
        peer.send(make_request("waits", [1, 2] * 10 * SIZE, 4))
        wait(lambda: pair.producer.scheduler.num_waiting and state.read_heartbeat().work_pending)
        before = state.read_heartbeat()
        wait(lambda: state.read_heartbeat().progress_at > before.progress_at + 0.5)
        after = state.read_heartbeat()
        assert pair.producer.scheduler.num_waiting
        assert after.steps - before.steps <= 1000 * (after.progress_at - before.progress_at), "it spins"
        for channel in channels:
            channel.close()
        assert peer.answer("waits")[1].error is None


def test_a_name_that_is_resolved_for_ever_delays_no_request_for_ever(start, monkeypatch):
    monkeypatch.setattr(kv_consumer, "_CONNECT_SECONDS", 0.2)
    resolved, pair = threading.Event(), start()
    connect = pair.consumer.connector._producers.connect

    def connect_late():
        assert resolved.wait(60)
        return connect()

    monkeypatch.setattr(pair.consumer.connector._producers, "connect", connect_late)
    assert pair.ask(list(range(40))) == answer(range(40), 12)
    assert pair.consumer.connector.stats()[:2] == (0, 1)
    resolved.set()
    wait(lambda: not pair.consumer.connector._threads)
    assert pair.consumer.connector.stats()[:2] == (0, 1), "what comes too late counts for nothing"
    pair.assert_free(5)


def test_a_transfer_that_ends_after_the_engine_ends_without_an_error(tmp_path):
    socket = EngineSocket(tmp_path, INFO)
    socket.close()
    socket.wake()


def test_a_transfer_wakes_an_engine_that_waits_for_its_clients(tmp_path):
    waiting, ended = EngineSocket(tmp_path, INFO), threading.Event()
    thread = threading.Thread(target=lambda: (waiting.poll(60.0), ended.set()))
    thread.start()
    waiting.wake()
    assert ended.wait(60)
    thread.join()
    waiting.wake()
    waiting.wake()
    waiting.poll(60.0)
    waiting.close()


def test_blocks_of_a_transfer_that_failed_are_cleared_before_they_are_free(start, monkeypatch):
    pair = start(next_fault=lambda: ("corrupt", 400))
    cleared, clear = [], pair.consumer.runner.clear

    def recorded(block_ids):
        cleared.append((len(block_ids), pair.consumer.scheduler.kv.has_transfers))
        clear(block_ids)

    monkeypatch.setattr(pair.consumer.runner, "clear", recorded)
    assert pair.ask(list(range(40))) == answer(range(40), 12)
    assert pair.consumer.connector.stats()[:2] == (0, 1)
    assert pair.link.happened == ["corrupt"]
    assert cleared == [(9, True)]


class NeverCommitted(Scheduler):
    """Of one side; the other one goes on."""

    num_committed = -1


STAGED = pytest.mark.parametrize("transport", ["tcp", "shared_memory", "nixl"])


@STAGED
def test_blocks_go_through_the_host_where_a_device_computes(start, transport):
    pair = start(transport=transport, staged=(NUM_BLOCKS, NUM_BLOCKS))
    before = pair.consumer.runner.num_computed
    prompt = prompts(1, 1)[0] + [7] * 40
    assert pair.ask(prompt) == answer(prompt, 12)
    assert pair.consumer.runner.num_computed - before <= SIZE + 12
    assert pair.consumer.runner.num_loaded == (len(prompt) - 1) // SIZE
    assert pair.consumer.connector.stats()[:2] == (1, 0)
    pair.assert_free(5)
    assert pair.ask(prompt, 2) == answer(prompt, 12)
    assert pair.consumer.connector.stats()[:2] == (1, 0), "it is in the prefix cache"


def test_a_prefix_that_is_cached_at_the_producer_is_staged_without_being_computed_again(start):
    pair, prompt = start(staged=(NUM_BLOCKS, NUM_BLOCKS)), list(range(41))
    with Peer(pair.producer) as peer:
        peer.send(make_request("request 1", prompt))
        assert peer.answer("request 1")[0] == answer(prompt, 3)
    computed = pair.producer.runner.num_computed
    assert pair.ask(prompt, 2) == answer(prompt, 12)
    assert pair.consumer.connector.stats()[:2] == (1, 0)
    assert pair.producer.runner.num_computed == computed
    pair.assert_free(5)


def test_prefixes_wait_while_the_host_of_the_producer_is_full(start):
    """Room for one of them at a time."""
    pair = start(staged=(10, NUM_BLOCKS))
    wanted = [[number, *range(40)] for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda number: pair.ask(wanted[number], number), range(len(wanted))))
    assert found == [answer(prompt, 12) for prompt in wanted]
    assert pair.consumer.connector.stats()[:2] == (len(wanted), 0)
    pair.assert_free(5)


def test_a_prefix_that_the_host_of_the_producer_never_has_room_for_is_computed_here(start):
    pair = start(staged=(9, NUM_BLOCKS))
    assert pair.ask(list(range(41)), 1) == answer(range(41), 12)
    assert pair.consumer.connector.stats()[:2] == (0, 1)
    assert pair.ask(list(range(37)), 2) == answer(range(37), 12)
    pair.assert_free(5)


def test_of_a_prefix_that_this_host_has_no_room_for_as_much_is_fetched_as_fits(start):
    pair, prompt = start(staged=(NUM_BLOCKS, 6)), list(range(41))
    assert pair.ask(prompt, 1) == answer(prompt, 12)
    stats = pair.consumer.connector.stats()
    assert (stats[:2], stats.blocks) == ((1, 0), 6)
    assert pair.ask(prompt, 2) == answer(prompt, 12)
    assert pair.consumer.connector.stats() == stats, "as much is cached"
    pair.assert_free(5)


def test_what_was_read_to_the_host_is_in_the_prefix_cache_only_once_it_is_on_the_device(start, monkeypatch):
    pair = start(staged=(NUM_BLOCKS, NUM_BLOCKS))
    scheduler, prompt = pair.consumer.scheduler, list(range(41))
    monkeypatch.setattr(scheduler, "__class__", NeverCommitted)  # the step that copies stays in flight
    with Peer(pair.consumer) as peer:
        peer.connection.settimeout(30)
        peer.send(make_request("request 1", prompt, 12))
        wait(lambda: pair.consumer.connector._copying)
        pair.ask([5] * (3 * SIZE - 1), 2)  # steps of another request
        assert scheduler.kv.num_cached_tokens(prompt[:40], "") == 0
        assert scheduler.kv.stats().host_used == 10, "no other transfer gets the slots"
        monkeypatch.undo()
        pair.ask([5] * (3 * SIZE - 1), 3)
        assert peer.answer("request 1")[0] == answer(prompt, 12)
    assert scheduler.kv.num_cached_tokens(prompt[:40], "") == 40
    pair.assert_free(5)


def test_a_client_that_goes_while_blocks_are_copied_leaves_no_block_and_no_slot(start, monkeypatch):
    pair = start(staged=(NUM_BLOCKS, NUM_BLOCKS))
    monkeypatch.setattr(pair.consumer.scheduler, "__class__", NeverCommitted)
    with Peer(pair.consumer) as peer:
        peer.send(make_request("request 1", list(range(41)), 12))
        wait(lambda: pair.consumer.connector._copying)
        peer.send(aborts=("request 1",))
        wait(lambda: not pair.consumer.connector.requests())
        monkeypatch.undo()
        assert pair.ask([5] * (3 * SIZE - 1), 2)
    pair.assert_free(5)
    assert pair.consumer.connector.stats()[:2] == (0, 0)


@pytest.mark.parametrize("place", [0, 4, 0.5, -1], ids=["checksum", "first", "middle", "last"])
def test_a_corrupted_description_of_a_nixl_agent_is_refused_by_name_and_the_prompt_computed_here(
    start, monkeypatch, caplog, place
):
    """It has addresses in the producer's memory, and the library believes what it is given."""
    pack, sent = frames.pack_agent, []

    def corrupted(metadata):
        body = bytearray(pack(metadata))
        body[int(place * len(body)) if place == 0.5 else place] ^= 1
        sent.append(body)
        return bytes(body)

    monkeypatch.setattr(frames, "pack_agent", corrupted)
    pair, prompt = start(transport="nixl"), list(range(40))
    with caplog.at_level("INFO"):
        assert pair.ask(prompt, 1) == answer(prompt, 12)
    assert sent, "the fault took effect"
    (said,) = [record.why for record in caplog.records if record.msg.startswith("a prefix is computed here")]
    assert "the description of the producer's NIXL agent has another checksum" in said
    monkeypatch.undo()
    monkeypatch.setattr(client, "_RETRY_SECONDS", 0.0)
    until_transfers(pair, 1)
    pair.assert_free(5)


FAULTS = ("kill", "freeze", "corrupt", "corrupt_request", "reject")


ONE, TWO = (1, 1), (2, 1)
STAGED_ON_BOTH = {"staged": (24, 24)}
CASES = {
    "tcp": ("tcp", {}, 200),
    "shared_memory": ("shared_memory", {}, 200),
    "nixl": ("nixl", {}, 50),  # the slowest
    "tcp, through the host": ("tcp", STAGED_ON_BOTH, 100),
    "shared_memory, through the host": ("shared_memory", STAGED_ON_BOTH, 100),
    "2 ranks to 1": ("tcp", {"ranks": (TWO, ONE)}, 15),
    "1 rank to 2": ("tcp", {"ranks": (ONE, TWO)}, 15),
    "2 ranks to 2": ("tcp", {"ranks": (TWO, TWO)}, 15),
    "2 stages to 1": ("tcp", {"ranks": ((1, 2), ONE)}, 15),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("transport", "sides", "count"), CASES.values(), ids=CASES)
def test_faults_at_random_points_give_no_wrong_token_no_hang_and_no_lost_block(
    start, monkeypatch, transport, sides, count
):
    """So many of them, or what the environment says, and every kind; then transfers succeed again."""
    count = int(os.environ.get("TRANSFER_FAULTS", count))
    for module, name, seconds in (
        (transfer, "_SETUP_SECONDS", 0.3),
        (client, "_SILENCE_SECONDS", 0.5),
        (client, "_RETRY_SECONDS", 0.0),
        (handshake, "SECONDS", 0.3),
    ):
        monkeypatch.setattr(module, name, seconds)
    draw, is_faulty = random.Random(1), True

    def next_fault():
        is_due = is_faulty and draw.random() < 0.8
        return (draw.choice(FAULTS), draw.randrange(700)) if is_due else None

    pair = start(next_fault=next_fault, transport=transport, **sides)
    if transport == "shared_memory":
        monkeypatch.setattr(shared_memory, "_name", lambda incarnation: pair.link.address)
    wanted = prompts(1, 12 * count)
    aborts = [draw.random() * 0.05 if draw.random() < 0.3 else None for _ in wanted]
    salts = [draw.choice("ab") for _ in wanted]

    def ask(number):
        found = pair.ask(wanted[number], number, abort_after=aborts[number], cache_salt=salts[number])
        return found is None or found == answer(wanted[number], 12)

    asked, happened = 0, Counter()
    with ThreadPoolExecutor(6) as pool:
        while happened.keys() < {*FAULTS, "abort"} or sum(happened.values()) < count:
            assert asked < len(wanted), happened
            assert all(pool.map(ask, range(asked, asked + 12)))
            asked += 12
            happened = Counter(pair.link.happened)
            happened["abort"] = sum(seconds is not None for seconds in aborts[:asked])
    pair.assert_free(LEASE + 5)
    assert pair.consumer.connector.stats().failed, happened
    is_faulty = False
    for module, name in ((transfer, "_SETUP_SECONDS"), (client, "_SILENCE_SECONDS"), (handshake, "SECONDS")):
        monkeypatch.setattr(module, name, 20.0)
    until_transfers(pair, 5)
    pair.assert_free(LEASE + 5)
