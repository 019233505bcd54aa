"""A vocabulary that ranks do not divide evenly is padded, in whole rows of the CPU's int8 kernel."""

from functools import partial
from pathlib import Path

import pytest
import torch

from quire_server.core.topology import Topology
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels
from quire_server.layers.parallel import SingleRank
from quire_server.runner.loader import Checkpoint
from tests.server.models import families
from tests.server.models.lockstep import ThreadRanks
from tests.server.models.test_sharding import CPU, PROMPT, forward, shards

# Of 250 the last of 4 ranks has less than the others; of 40 it has nothing, and the third one little.
VOCABULARIES = {250: [64, 64, 64, 58], 40: [16, 16, 8, 0]}


def test_one_rank_has_no_padding() -> None:
    assert Topology().padded_part(211) == 211


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_ranks_compute_the_logits_of_the_vocabulary_and_none_of_its_padding(
    tmp_path: Path, vocab_size: int, *, is_tied: bool
) -> None:
    settings = {"vocab_size": vocab_size, "tie_word_embeddings": is_tied, "pad_token_id": None}
    families.build(tmp_path, "Llama", settings)
    whole = Checkpoint.open(tmp_path, dtype="float32", quantization_name="none").read(
        max_len=256, device=CPU, on_progress=lambda *_: None
    )
    prompt = tuple(token % vocab_size for token in PROMPT)
    ranks = ThreadRanks(4)
    models = shards(tmp_path, ranks)
    assert {model.config.vocab_rows % 16 for model in models} == {0}
    own = [int((model.embedding != 0).any(dim=1).sum()) for model in models]
    assert own == VOCABULARIES[vocab_size]

    logits = ranks.run([partial(forward, model, prompt) for model in models])[0]

    assert logits.shape == (len(prompt), vocab_size)
    torch.testing.assert_close(logits, forward(whole, prompt), atol=2e-4, rtol=1e-3)


def test_an_int8_head_of_a_rank_is_computed_by_the_native_kernel_whatever_the_vocabulary(
    tmp_path: Path,
) -> None:
    families.build(tmp_path, "Llama", {"vocab_size": 211, "tie_word_embeddings": True})
    checkpoint = Checkpoint.open(tmp_path, dtype="float32", quantization_name="int8")
    for rank in range(2):
        head = checkpoint.read_shard(Topology(2, rank), SingleRank(), max_len=64, device=CPU).head
        assert isinstance(head, Int8Linear)
        assert head._quantised is not None
        assert head._quantised.is_native is has_native_kernels()
