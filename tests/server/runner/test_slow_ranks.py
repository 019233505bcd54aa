"""A rank that is late at random passes diverges from no other one, whatever the steps have: aborts,
preemption, passes that compute nothing. `SLOW_RANK_STEPS` and `SLOW_RANK_SECONDS`: how many, and how late.
"""

import os
import random

import numpy as np
import pytest

from e2e.failure_paths import recorder
from quire_server.core.config import PreemptionMode
from quire_server.core.request import Request
from quire_server.fault_injection import INJECTED
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.ranks_in_process import Ranks
from tests.server.tiny_model import write

STEPS = int(os.environ.get("SLOW_RANK_STEPS", "200"))
SECONDS = float(os.environ.get("SLOW_RANK_SECONDS", "0.01"))
BLOCKS = 12
OPTIONS = {"num_blocks_override": BLOCKS, "quantization": "none", "kv_offload_host_bytes": 1 << 20}
LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": BLOCKS,
    "num_host_slots": 16,
    "preemption_mode": PreemptionMode.SWAP,
}

pytestmark = pytest.mark.timeout(120 + STEPS * SECONDS)


class Drive:
    """The same requests and aborts for each engine, at the same steps."""

    def __init__(self, runner):
        self.engine, self.dice = InProcessEngine(runner, **LIMITS), random.Random(3)
        self.tokens, self.errors = {}, {}
        self.num_steps = self.num_empty = self.num_aborted = self._num_added = 0

    def run(self):
        """Until there were so many steps and all requests have ended. Now and then all end before others
        come, of which the first is longer than the cache, and ends in a step without rows.
        """
        scheduler = self.engine.scheduler
        while self.num_steps < STEPS:
            for _ in range(30):
                self._add(self.dice.randint(5, 60), self.dice.randint(4, 40))
                if self.dice.random() < 0.3:
                    self._abort()
                self._step()
            while scheduler.has_work:
                self._step()
            self._add(16 * BLOCKS + 1, 4)
        while scheduler.has_work:
            self._step()
        scheduler.check()
        return self

    def _add(self, num_prompt, num_tokens):
        self._num_added += 1
        prompt = tuple(self.dice.randrange(250) for _ in range(num_prompt))
        self.engine.scheduler.add(Request(str(self._num_added), prompt, greedy(num_tokens), 0.0))

    def _abort(self):
        name = str(self.dice.randint(max(1, self._num_added - 6), self._num_added))
        self.num_aborted += name not in self.errors
        self.engine.scheduler.abort(name)

    def _step(self):
        step = self.engine.scheduler.schedule()
        if step is None:
            return
        self.num_steps += 1
        self.num_empty += not step.rows
        for event in self.engine.scheduler.commit(step, self.engine.runner.run(step)):
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.error is not None:
                self.errors[event.request_id] = event.error


def test_a_late_rank_diverges_from_no_other_one(tmp_path, caplog):
    directory = write(tmp_path / "tiny")
    expected = Drive(load(directory, **OPTIONS)).run()
    fault = f"rank_delay:rank=1,seconds={SECONDS}"
    ranks = Ranks(directory, 2, fault=fault, **OPTIONS)
    try:
        found = Drive(ranks.runner).run()
        batches = [ranks.runner._input_batch, *(one._input_batch for one in ranks.followers)]
    finally:
        ranks.close()
    (injected,) = [record.fault for record in caplog.records if record.message == INJECTED]
    assert injected == "rank_delay"
    recorder.record("fault", injected)
    assert found.num_steps == expected.num_steps >= STEPS
    assert found.tokens == expected.tokens
    assert found.errors == expected.errors
    assert found.num_empty > 0
    assert found.num_aborted > 5
    assert found.engine.scheduler.stats.preemptions > 5
    for name in ("tokens", "block_table"):
        assert np.array_equal(*(getattr(batch, name) for batch in batches)), name
