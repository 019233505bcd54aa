"""A model owns its embedding and norms; every other matrix is made by the linear factory, which decides how
to store it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_server.layers.linear import Linear, LinearShape
from quire_server.models import registry
from tests.server.models.variants import SIZES, VARIANTS

CPU = torch.device("cpu")


class Recorder:
    """A factory of dense layers that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.finished: list[tuple[str, ...]] = []
        self.shared: list[tuple[str, ...]] = []

    def __call__(self, shape: LinearShape) -> Linear:
        key, recorder = tuple(shape.prefixes), self
        self.asked.append(key)
        if shape.weight is not None:
            self.shared.append(key)

        class Layer(Linear):
            def finish(self) -> None:
                recorder.finished.append(key)

        return Layer(shape)


def build(variant: str, factory: Any) -> registry.Decoder:
    prefix, settings = VARIANTS[variant]
    config = registry.parse({"architectures": [f"{prefix}ForCausalLM"]} | SIZES | settings, ())
    return registry.build(config, max_len=8, dtype=torch.bfloat16, device=CPU, linear=factory)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_matrix_of_every_family_comes_from_the_factory(variant: str) -> None:
    factory = Recorder()
    model = build(variant, factory)
    targets: dict[str, Tensor] = model.targets()

    prefixes = [prefix for key in factory.asked for prefix in key]
    assert len(prefixes) == len(set(prefixes))
    own = {name for name in targets if name.rpartition(".")[0] not in prefixes}
    assert all(name == "model.embed_tokens.weight" or name.endswith("norm.weight") for name in own), own
    assert factory.shared == ([("lm_head",)] if model.config.tie_word_embeddings else [])
    assert ("lm_head.weight" in targets) == (not model.config.tie_word_embeddings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_is_finished_once(variant: str) -> None:
    factory = Recorder()
    model = build(variant, factory)
    for target in model.targets().values():
        target.zero_()
    model.finish()
    assert sorted(factory.finished) == sorted(factory.asked)
    if model.config.has_offset_norms:
        assert model.norm.weight.dtype == torch.float32 and model.norm.weight.eq(1).all()
