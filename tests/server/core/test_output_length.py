"""Shortest job first learns from every completed answer: by a stop token, or by a stop string in the API
process.
"""

import pytest

from quire_server.core.policy import Policy
from quire_server.core.scheduler import Scheduler
from quire_server.core.step import StepResult
from tests.server.core.fake_runner import EOS, config, request

CHAT = {"prompt": range(2), "max_tokens": 40}  # short answers
ESSAY = {"prompt": range(20), "max_tokens": 30}  # long ones, though less is asked for


def finish_answer(scheduler: Scheduler, kind: dict[str, object], length: int, how: str) -> None:
    """Run one answer that ends after `length` tokens."""
    scheduler.add(request("past", **kind))  # type: ignore[arg-type]  # a dict of mixed values
    said = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        said += sum(step.samples)
        token = EOS if said == length and how == "eos" else 1
        scheduler.commit(step, StepResult(step.step_id, (token,) * sum(step.samples)))
        if said == length and how == "stop string":
            scheduler.finish("past")
        elif said == length and how == "hung up":
            scheduler.abort("past")


@pytest.mark.parametrize(
    ("how", "first"), [("eos", "chat"), ("stop string", "chat"), ("hung up", "essay"), ("never", "essay")]
)
def test_completed_answers_decide_the_order_and_aborted_ones_do_not(how: str, first: str) -> None:
    scheduler = Scheduler(config(policy=Policy.SJF, max_num_batched_tokens=64), eos_token_ids=[EOS])
    for _ in range(10 if how != "never" else 0):
        finish_answer(scheduler, CHAT, 3, how)
        finish_answer(scheduler, ESSAY, 25, how)
    for name, kind in (("chat", CHAT), ("essay", ESSAY)):
        scheduler.add(request(name, **kind))  # type: ignore[arg-type]  # as above
    step = scheduler.schedule()
    assert step is not None and [row.request_id for row in step.started][0] == first


def test_finishing_an_unknown_request_does_nothing() -> None:
    scheduler = Scheduler(config(policy=Policy.SJF), eos_token_ids=[EOS])
    scheduler.finish("unknown")
    assert not scheduler.has_work
