"""Which layers' weights stay on the host."""

import pytest

from quire_server.core.weight_offload import streamed_layers
from quire_server.errors import ConfigError

GIB = 1 << 30


def test_as_many_layers_as_fit_stay_on_the_host_evenly_spaced() -> None:
    sizes = [GIB // 2] * 32
    assert streamed_layers(sizes, 2) == (7, 15, 23, 31)
    assert streamed_layers(sizes, 2.49) == (7, 15, 23, 31)
    assert streamed_layers(sizes, 5.5) == (1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31)
    assert streamed_layers(sizes, 16) == streamed_layers(sizes, 900) == tuple(range(32))


def test_stages_have_equal_parts_of_the_room() -> None:
    sizes = [GIB // 2] * 16  # of one stage
    assert streamed_layers(sizes, 4, stages=2) == streamed_layers(sizes, 2) == (3, 7, 11, 15)
    with pytest.raises(ConfigError, match=r"2 holds 2 of 16 layers of a stage, .* give at least 3\."):
        streamed_layers(sizes, 2, stages=2)


def test_every_layer_is_counted_with_the_size_of_the_largest() -> None:
    assert streamed_layers([GIB, GIB // 4, GIB // 4, GIB], 3.9) == (0, 1, 3)


def test_an_offload_that_saves_no_memory_is_refused_with_a_sufficient_value() -> None:
    with pytest.raises(ConfigError, match=r"0\.4 holds 0 of 32 layers, .* give at least 1\.5\."):
        streamed_layers([GIB // 2] * 32, 0.4)
    with pytest.raises(ConfigError, match=r"1\.4 holds 2 of 32 layers"):
        streamed_layers([GIB // 2] * 32, 1.4)
    with pytest.raises(ConfigError, match="2 of 2 layers.*: drop it"):
        streamed_layers([GIB] * 2, 50)
