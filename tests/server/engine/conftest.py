"""An engine core with a runner without tensors, which a thread serves on a real socket."""

import threading
import time

import pytest

from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult
from quire_server.engine.engine_core import EngineCore
from quire_server.engine.golden_tokens import GoldenTokens
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.engine.messages import EngineInfo
from quire_server.engine.proof import ProofOfInference
from quire_server.engine.socket_server import EngineSocket
from quire_server.errors import CanaryMismatchError, RequestError
from quire_server.fault_injection import Faults
from quire_server.health.heartbeat import SharedState

VOCAB = 100
FINGERPRINT = "f" * 64
LIMITS = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=32, block_size=8
)
INFO = EngineInfo(max_model_len=64, vocab_size=VOCAB, num_blocks=32, block_size=8, max_num_seqs=4)


class FakeGrammars:
    """Builds a matcher once `may_build` is set; a grammar whose text begins with "error" fails."""

    def __init__(self):
        self.may_build = threading.Event()
        self.built = []
        self.admitted = set()

    def build(self, grammar):
        assert self.may_build.wait(60)
        self.built.append(grammar.text)
        if grammar.text.startswith("error"):
            raise RequestError(grammar.text)
        return grammar.text

    def admit(self, request_id, matcher):
        self.admitted.add(request_id)

    def forget(self, request_id):
        self.admitted.discard(request_id)


class CountingRunner:
    """Samples the last token plus one for each row; a test simulates a faulty device by `skew`."""

    def __init__(self, *, is_asynchronous):
        self.max_steps_in_flight = 2 if is_asynchronous else 1
        self.launched = []  # and not computed yet: a device computes as late as possible
        self.results = {}
        self.tokens = {}
        self.skew = 0
        self.delay = 0.0
        self.failing = {}  # the last token of a prompt: why its request fails
        self.batches = []  # numbers of rows
        self.grammars = FakeGrammars()
        self.adapters = None

    def launch(self, step):
        self.launched.append(step)
        if self.max_steps_in_flight == 1:
            self._compute(step)
        return lambda: self._compute(step)

    def _compute(self, step):
        while step.step_id not in self.results:
            first = self.launched.pop(0)
            self.results[first.step_id] = self._run(first)
        return self.results[step.step_id]

    def _run(self, step):
        time.sleep(self.delay)
        self.batches.append(len(step.rows))
        failures = {}
        for started in step.started:
            self.tokens[started.row] = started.token_ids[-1]
            if started.token_ids[-1] in self.failing:
                failures[started.row] = self.failing[started.token_ids[-1]]
        sampled = []
        for row, samples in zip(step.rows, step.samples, strict=True):
            if samples:
                self.tokens[row] = (self.tokens[row] + 1 + self.skew) % VOCAB
                sampled.append(self.tokens[row])
        return StepResult(step.step_id, tuple(sampled), failures=failures)


class Stop(Exception):
    """Ends the engine's loop."""


class StoppableSocket(EngineSocket):
    stopped = False

    def poll(self, timeout):
        if self.stopped:
            raise Stop
        return super().poll(min(timeout, 0.05))


class RunningEngine:
    """The engine core of one test in its thread, with its runner, scheduler, socket and shared state."""

    def __init__(self, run_dir, faults, proof, golden, is_asynchronous):
        self.run_dir = run_dir
        self.state = SharedState.create(run_dir)
        self.runner = CountingRunner(is_asynchronous=is_asynchronous)
        self.scheduler = Scheduler(LIMITS, eos_token_ids=())
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            info=INFO,
            heartbeat=HeartbeatWriter(self.state, time.monotonic()),
            faults=faults,
            proof=proof,
            golden=golden,
        )
        self.error = None
        self.core.warm_up()
        self.socket = StoppableSocket(run_dir, INFO)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        try:
            self.core.serve(self.socket)
        except Stop:
            pass
        except CanaryMismatchError as error:
            self.error = error

    def stop(self):
        self.socket.stopped = True
        self.thread.join(60)
        self.socket.close()

    def wait(self, condition, seconds=120.0):
        end = time.monotonic() + seconds
        while not condition(self):
            assert time.monotonic() < end, f"not within {seconds} s"
            assert self.thread.is_alive(), "the engine died"
            time.sleep(0.005)


@pytest.fixture(params=[False, True], ids=["host", "device"])
def start_engine(request, tmp_path):
    engines = []

    def make(faults=None, canary_interval=3600.0, stall=60.0, golden_path=None):
        proof = ProofOfInference(canary_interval, stall, time.monotonic())
        faults, golden = faults or Faults({}, tmp_path), GoldenTokens(golden_path, FINGERPRINT)
        engines.append(RunningEngine(tmp_path, faults, proof, golden, request.param))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture
def engine(start_engine):
    return start_engine()
