"""How layers are divided among the stages of a pipeline, and how ranks are numbered."""

import itertools

import pytest

from quire_server.core.topology import Topology, stage_layers

LAYER, HEAD = 3_540_096, 28_311_552  # SmolLM2-135M: parameters of a layer, and of the head


def sizes(layer_bytes, head_bytes, stages):
    return [layers.size for layers in stage_layers(layer_bytes, head_bytes, stages)]


@pytest.mark.parametrize(("stages", "expected"), [(1, [30]), (2, [19, 11]), (3, [13, 12, 5])])
def test_the_head_of_smollm2_counts_as_eight_layers(stages, expected):
    assert sizes([LAYER] * 30, HEAD, stages) == expected


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0, 3, 50])
def test_no_other_division_is_more_even(stages, head):
    layers = [5, 1, 1, 7, 2, 2, 9, 1]

    def squares(borders):
        parts = [sum(layers[begin:end]) for begin, end in itertools.pairwise((0, *borders, len(layers)))]
        parts[-1] += head
        return sum(part**2 for part in parts)

    found = stage_layers(layers, head, stages)
    assert [layer for each in found for layer in range(*each)] == list(range(len(layers)))
    best = min(map(squares, itertools.combinations(range(1, len(layers)), stages - 1)))
    assert squares([each.start for each in found[1:]]) == best


def test_a_head_that_outweighs_all_layers_leaves_the_other_stages_even():
    assert sizes([1] * 31, 100, 3) == [15, 15, 1]


def test_ranks_are_numbered_stage_by_stage():
    ranks = [Topology(3, rank, 2) for rank in range(6)]
    assert [(rank.stage, rank.tensor_rank) for rank in ranks] == [(s, t) for s in range(2) for t in range(3)]
    assert [rank.next for rank in ranks if rank.is_first_stage] == [3, 4, 5]
    assert [rank.previous for rank in ranks if rank.is_last_stage] == [0, 1, 2]
    assert {rank.head_rank for rank in ranks} == {3}
    assert [rank.rank for rank in ranks if rank.is_leader] == [0]
