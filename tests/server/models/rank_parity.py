"""The parity protocol of ranks: in float32 they give the greedy tokens of one rank, in whatever batches.

Ranks add their parts in another order, which moves logits by some 1e-4. So where tokens differ, the two best
ones of one rank have to be closer than ``TIE``, and such places have to be rare; what follows such a place is
another text, and not compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_server.core.config import PreemptionMode
from quire_server.runner.model_runner import ModelRunner
from tests.server.models.variants import VOCAB
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.pipelined import PipelinedEngine
from tests.server.runner.ranks_in_process import Ranks

TIE = 1e-3
_POSITIONS = {"max_position_embeddings": 512}
_GROUPED = _POSITIONS | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}

Sizes = tuple[int, int]  # ranks that share a layer, stages of layers

#: name -> (architecture, settings, what it is divided among)
MODELS: dict[str, tuple[str, Mapping[str, object], tuple[Sizes, ...]]] = {
    "Llama": ("Llama", _POSITIONS, ((2, 1), (4, 1), (1, 2), (2, 2))),
    "Qwen3, tied": ("Qwen3", _GROUPED | {"tie_word_embeddings": True}, ((2, 1), (4, 1), (1, 2))),
    "Qwen3, untied": ("Qwen3", _GROUPED | {"tie_word_embeddings": False}, ((2, 1), (4, 1))),
    "Mixtral": (
        "Mixtral",
        _POSITIONS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        ((2, 1), (4, 1), (1, 2)),
    ),
}
SMOLLM2: tuple[Sizes, ...] = ((3, 1), (1, 2), (1, 3), (3, 2))
_SHARED = [(5 * index * index + 3 * index) % (VOCAB - 2) + 2 for index in range(48)]
PROMPTS = [
    _SHARED[:cut] + [(11 * number + 7 * index * index) % (VOCAB - 2) + 2 for index in range(own)]
    for number, (cut, own) in enumerate(((0, 45), (48, 3), (0, 16), (32, 60), (0, 1), (48, 31)))
]


@dataclass(frozen=True, slots=True)
class Compared:
    """How many positions were compared, and at how many of them two tokens were as good as equally likely."""

    positions: int = 0
    ties: int = 0

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(self.positions + other.positions, self.ties + other.ties)


@dataclass(frozen=True, slots=True)
class Reference:
    """One rank's answers to each prompt alone, and by how much the best token is ahead at each position."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    margins: Sequence[Sequence[float]]

    @classmethod
    def of(cls, runner: ModelRunner, prompts: Sequence[Sequence[int]], length: int) -> "Reference":
        """Of a model on one rank."""
        engine = InProcessEngine(runner, max_num_seqs=1, enable_prefix_caching=False)
        answers = engine.generate(prompts, greedy(length, logprobs=2))
        found = [[entry.top for entry in engine.logprobs[str(index)]] for index in range(len(prompts))]
        margins = [[first[1] - second[1] for first, second, *_ in tops] for tops in found]
        return cls(prompts, answers, margins)

    def compare(self, answers: Sequence[Sequence[int]]) -> Compared:
        """Raises AssertionError at a difference that is no tie."""
        positions = ties = 0
        for answer, expected, margins in zip(answers, self.answers, self.margins, strict=True):
            assert len(answer) == len(expected)
            differing = (index for index, token in enumerate(answer) if token != expected[index])
            place = next(differing, None)
            if place is not None:
                assert margins[place] < TIE, f"at {place}, where the margin is {margins[place]:.4f}"
                ties += 1
            positions += len(expected) if place is None else place + 1
        return Compared(positions, ties)


def conditions(longest: int) -> dict[str, dict[str, object]]:
    """Limits of the scheduler, for sequences of at most so many tokens."""
    few = {"num_blocks": round(1.6 * -(-longest // 16)), "max_model_len": longest}
    return {
        "mixed batches": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 6},
        "preempted": few,
        "swapped": few | {"num_host_slots": 64, "preemption_mode": PreemptionMode.SWAP},
        "prefix hits": {},
    }


def check(reference: Reference, ranks: Ranks, condition: str) -> Compared:
    """Compare the answers of ranks under a condition with the reference."""
    length = len(reference.answers[0])
    longest = length + max(map(len, reference.prompts))
    limits = conditions(longest)[condition]
    engine: InProcessEngine | PipelinedEngine = InProcessEngine(ranks.runner, **limits)
    if ranks.pipeline > 1:
        engine = PipelinedEngine(ranks.runner, ranks.pipeline, **limits)
    if condition == "prefix hits":
        engine.generate(reference.prompts, greedy(1))
    compared = reference.compare(engine.generate(reference.prompts, greedy(length)))
    assert (condition in ("preempted", "swapped")) == (engine.scheduler.stats.preemptions > 0)
    assert (condition == "swapped") == (engine.scheduler.kv.stats().swaps > 0)
    assert (condition != "prefix hits") or engine.scheduler.kv.stats().prefix_hits > 0
    if isinstance(engine, PipelinedEngine) and condition != "swapped":  # which has one step at a time
        assert engine.most_in_flight == ranks.pipeline
    return compared


def divided(directory: Path, sizes: Sizes, **options: object) -> Ranks:
    """The ranks that ``check`` takes, with room on the host for as many blocks as a condition has."""
    return Ranks(directory, *sizes, kv_offload_host_bytes=64 << 20, **options)


def whole(directory: Path, **options: object) -> ModelRunner:
    """The runner that ``Reference.of`` takes."""
    return load(directory, quantization="none", **options)
