"""Equal prompts that come together are computed once, and none waits for one that was aborted or is later."""

import pytest

from quire_server.core.config import Batching
from quire_server.core.policy import CLASSES, Policy
from quire_server.core.scheduler import Scheduler
from quire_server.core.step import Step
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, drain, request

PROMPT = [n % 50 for n in range(400)]


class Engine:
    """A scheduler with room for all that the tests send, and the tokens of each step by request."""

    def __init__(self, **changes: object) -> None:
        roomy = {"max_num_seqs": 20, "max_num_batched_tokens": 8000, "max_model_len": 1000}
        self.config = config(**{**roomy, "block_size": 16, "num_blocks": 600, **changes})
        self.scheduler = Scheduler(self.config, eos_token_ids=[EOS])
        self.runner = FakeRunner(self.config)
        self._rows: dict[int, str] = {}

    def step(self) -> dict[str, int]:
        step = self.scheduler.schedule()
        assert step is not None
        computed = self._by_request(step)
        self.scheduler.commit(step, self.runner.run(step))
        self.scheduler.check()
        return computed

    def _by_request(self, step: Step) -> dict[str, int]:
        self._rows |= {one.row: one.request_id for one in step.started}
        return {self._rows[row]: number for row, number in zip(step.rows, step.num_tokens, strict=True)}

    def finish(self) -> dict[str, list[int]]:
        return drain(self.scheduler, self.runner)[0]


def test_sixteen_answers_of_one_prompt_compute_its_full_blocks_once() -> None:
    engine = Engine()
    for number in range(16):
        engine.scheduler.add(request(f"r{number}", PROMPT, max_tokens=4))
    assert engine.step() == {"r0": 400}
    assert engine.step() == {"r0": 1} | {f"r{number}": 16 for number in range(1, 16)}
    assert engine.finish()["r15"] == answer(PROMPT, 4)[1:]


def test_answers_of_one_prompt_fit_into_a_cache_that_has_no_room_for_a_prompt_each() -> None:
    engine = Engine(num_blocks=24 + 16 * 2 + 4)
    for number in range(16):
        engine.scheduler.add(request(f"r{number}", PROMPT, max_tokens=4))
    tokens = engine.finish()
    assert tokens == {f"r{number}": answer(PROMPT, 4) for number in range(16)}
    assert engine.scheduler.stats.preemptions == 0


def test_a_prompt_in_chunks_is_waited_for_until_all_that_is_shared_is_there() -> None:
    engine = Engine(max_num_batched_tokens=160)
    engine.scheduler.add(request("first", [*PROMPT, 1], max_tokens=1))
    engine.scheduler.add(request("second", [*PROMPT, 2], max_tokens=1))
    assert engine.step() == {"first": 160}
    assert engine.step() == {"first": 160}
    assert engine.step() == {"first": 81}
    assert engine.step() == {"second": 1}


def test_others_go_before_a_request_that_waits_for_the_prompt_of_another() -> None:
    engine = Engine()
    for name, prompt in (("first", PROMPT), ("second", PROMPT), ("other", [7] * 40)):
        engine.scheduler.add(request(name, prompt))
    assert engine.step() == {"first": 400, "other": 40}
    assert engine.step() == {"first": 1, "second": 16, "other": 1}


def test_a_prompt_of_which_less_than_half_is_shared_is_computed_at_once() -> None:
    engine = Engine()
    engine.scheduler.add(request("first", PROMPT))
    engine.scheduler.add(request("second", [*PROMPT[:192], *[9] * 208]))
    assert engine.step() == {"first": 400, "second": 400}


@pytest.mark.parametrize("salts", [("a", "b"), ("", "b")])
def test_a_prompt_with_another_salt_is_not_waited_for(salts: tuple[str, str]) -> None:
    engine = Engine()
    for salt in salts:
        engine.scheduler.add(request(f"of {salt}", PROMPT, cache_salt=salt))
    assert list(engine.step().values()) == [400, 400]


def test_without_a_prefix_cache_equal_prompts_are_computed_side_by_side() -> None:
    engine = Engine(enable_prefix_caching=False)
    for name in ("first", "second"):
        engine.scheduler.add(request(name, PROMPT))
    assert engine.step() == {"first": 400, "second": 400}


def test_static_batches_begin_together() -> None:
    engine = Engine(batching=Batching.STATIC)
    for name in ("first", "second"):
        engine.scheduler.add(request(name, PROMPT))
    assert engine.step() == {"first": 400, "second": 400}


def test_when_the_one_that_is_waited_for_is_aborted_the_next_one_computes_the_rest() -> None:
    engine = Engine(max_num_batched_tokens=160)
    for name in ("first", "second", "third"):
        engine.scheduler.add(request(name, PROMPT))
    assert engine.step() == {"first": 160}
    engine.scheduler.abort("first")
    assert engine.step() == {"second": 160}
    assert engine.step() == {"second": 80}
    assert engine.step() == {"second": 1, "third": 16}
    assert engine.finish()["third"] == answer(PROMPT, 4)[1:]


def test_an_urgent_request_does_not_wait_for_the_same_prompt_of_one_that_is_not() -> None:
    engine = Engine(max_num_batched_tokens=160, policy=Policy.PRIORITY)
    engine.scheduler.add(request("low", PROMPT, priority=CLASSES["low"], arrival=0.0))
    assert engine.step() == {"low": 160}
    engine.scheduler.add(request("urgent", PROMPT, priority=CLASSES["high"], arrival=1.0))
    assert "urgent" in engine.step()
