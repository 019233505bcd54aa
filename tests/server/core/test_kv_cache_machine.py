"""The KV manager against an oracle that remembers what was written to each block: nothing is found that is
not there, everything is found while nothing had to go, and every block is accounted for.
"""

from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_server.core import block_hash
from quire_server.core.block_hash import BlockHashChain
from quire_server.core.kv_cache_manager import KVCacheManager
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.sequence import Sequence
from tests.examples import examples
from tests.server.core.fake_runner import config

SIZE = 2
# Few different blocks, so that prompts share beginnings, and collide when hashes are weak.
prompts = st.lists(st.sampled_from([(0, 0), (1, 1), (0,)]), min_size=2, max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([6, 12, 400]), weak_hash=st.booleans())
    def begin(self, num_blocks: int, weak_hash: bool) -> None:
        self.is_roomy, self.is_hash_weak = num_blocks == 400, weak_hash
        # All prompts of a salt collide, block by block.
        self.patch = mock.patch.object(
            block_hash, "digest", lambda previous, block: bytes([(previous[0] + 1) % 256])
        )
        if weak_hash:
            self.patch.start()
        self.now = 0.0
        self.kv = KVCacheManager(
            config(num_blocks=num_blocks, block_size=SIZE, max_pinned_share=0.3), lambda: self.now
        )
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> salt, prefix up to its end
        self.computed: set[tuple[str, tuple[int, ...]]] = set()  # since the last reset
        self.running: list[Sequence] = []

    @rule(
        several=st.lists(prompts, min_size=1, max_size=4),
        salt=st.sampled_from(["", "", "x"]),
        ttl=st.sampled_from([0.0, 3.0, 9.0]),
        client=st.sampled_from(["", "alice", "bob"]),
    )
    def start_some(self, several: list[list[int]], salt: str, ttl: float, client: str) -> None:
        for prompt in several:
            self.start(prompt, salt, ttl, client)

    def start(self, prompt: list[int], salt: str, ttl: float, client: str) -> None:
        kept = {"cache_salt": salt, "cache_ttl": ttl, "client": client}
        request = Request("r", tuple(prompt), SamplingParams(9), 0.0, **kept)  # type: ignore[arg-type]
        sequence = Sequence(request, (0, 0), 0, frozenset(), 99, 0, 99, list(prompt), BlockHashChain(salt))
        match = self.kv.match(sequence)
        assert match is not None
        for place, block_id in match.hits.items():
            assert self.written[block_id] == (salt, tuple(prompt[: (place + 1) * SIZE]))
        if self.is_roomy and not self.is_hash_weak:
            known = [
                n
                for n in range(len(prompt) // SIZE + 1)
                if (salt, tuple(prompt[: n * SIZE])) in self.computed
            ]
            assert match.num_cached == SIZE * min(max(known, default=0), (len(prompt) - 1) // SIZE)
        if self.kv.fits(match, is_alone=not self.running):
            self.kv.start(sequence, match)
            self.running.append(sequence)
            self.compute(sequence)

    def compute(self, sequence: Sequence) -> None:
        sequence.num_computed = len(sequence.tokens)
        for place, block_id in enumerate(sequence.block_ids):
            prefix = (sequence.block_hashes.salt, tuple(sequence.tokens[: (place + 1) * SIZE]))
            if len(prefix[1]) == (place + 1) * SIZE:
                self.written[block_id] = prefix
                self.computed.add(prefix)
        self.kv.publish(sequence)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), token=st.integers(0, 1))
    def decode(self, choice: int, token: int) -> None:
        sequence = self.running[choice % len(self.running)]
        if len(sequence.tokens) < sequence.capacity or self.kv.append_block(sequence) is not None:
            sequence.tokens.append(token)
            if not self.was_reset_under(sequence):
                self.compute(sequence)

    def was_reset_under(self, sequence: Sequence) -> bool:
        """Whether the cache was reset since it started. Its later blocks are never found."""
        return bool(sequence.block_hashes.numbers) and sequence in getattr(self, "survivors", ())

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), preempted=st.booleans())
    def end(self, choice: int, preempted: bool) -> None:
        sequence = self.running.pop(choice % len(self.running))
        if preempted:
            self.kv.preempt(sequence)
        self.kv.finish(sequence)

    @rule(seconds=st.floats(0, 4))
    def advance_time(self, seconds: float) -> None:
        self.now += seconds
        self.kv.expire_pins()

    @rule()
    def reset(self) -> None:
        self.kv.reset()
        self.computed.clear()
        self.survivors = list(self.running)

    @invariant()
    def check_accounts(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check(self.running)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.patch.stop()
        for sequence in self.running:
            self.kv.finish(sequence)
        self.kv.release_pins()
        assert self.kv.utilization == 0
        self.kv.check([])


TestKV = KVCacheMachine.TestCase
TestKV.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
