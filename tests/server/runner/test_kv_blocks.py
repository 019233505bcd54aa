"""KV blocks of all ranks as bytes: a block that is copied gives every rank its own keys and values, whatever
the numbers of ranks on both sides.
"""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch

from quire_server.core.kv_division import KVDivision, KVMemory
from quire_server.core.topology import Range
from quire_server.runner import kv_cache
from quire_server.runner.kv_blocks import HostKVBlocks

NUM_BLOCKS, HEADS, SIZE, HEAD, LAYERS = 5, 2, 4, 8, 3
CPU = torch.device("cpu")
ONE, TWO = (Range(0, LAYERS),), (Range(0, 2), Range(2, LAYERS))
DIVISIONS = [*itertools.product([1, 2, 4], [ONE, TWO])]


class Server:
    """The KV caches of all ranks of a server, as each of them has allocated its own."""

    def __init__(self, tensor=1, stages=ONE, dtype=torch.float32, seed=0):
        self.division = KVDivision(HEADS, tensor, stages)
        self.row = kv_cache.row_bytes(SimpleNamespace(head_size=HEAD), dtype)
        layout = KVMemory(self.division, NUM_BLOCKS, SIZE * self.row)
        self.blocks = HostKVBlocks(layout, os.memfd_create("test"))
        others = [HostKVBlocks(layout, os.dup(self.blocks.descriptor)) for _ in range(1, self.num_ranks)]
        self.caches = [
            self._allocated(rank, blocks, dtype) for rank, blocks in enumerate([self.blocks, *others])
        ]
        if seed:
            self._fill(seed)

    @property
    def num_ranks(self):
        return self.division.num_ranks

    def _allocated(self, rank, blocks, dtype):
        config = SimpleNamespace(
            num_layers=self.division.layers(rank).size,
            num_kv_heads=self.division.heads(rank).size,
            head_size=HEAD,
        )
        memory = blocks.of_rank(rank)
        found = kv_cache.allocate(config, NUM_BLOCKS, SIZE, dtype=dtype, device=CPU, memory=memory)
        plain = kv_cache.allocate(config, NUM_BLOCKS, SIZE, dtype=dtype, device=CPU)
        assert [(one.shape, one.dtype, one.is_contiguous()) for one in found] == [
            (one.shape, one.dtype, one.is_contiguous()) for one in plain
        ]
        assert not any(one.view(torch.uint8).any() for one in found)
        return found

    def _fill(self, seed):
        """Every rank with a head has the same bytes of it."""
        generator, shape = torch.Generator().manual_seed(seed), (2, NUM_BLOCKS, SIZE, self.row)
        for layer, head in itertools.product(range(LAYERS), range(HEADS)):
            content = torch.randint(1, 120, shape, dtype=torch.uint8, generator=generator)
            for part in self.parts(layer, head):
                part.view(torch.uint8).copy_(content)

    def parts(self, layer, head):
        """The keys and values of a head of the model, in each rank that has it."""
        return [
            self.caches[rank][layer - layers.start][:, :, head - heads.start]
            for rank in range(self.num_ranks)
            if layer in range(*(layers := self.division.layers(rank)))
            and head in range(*(heads := self.division.heads(rank)))
        ]

    def contents(self, block_id):
        """By layer and head: the distinct bytes that ranks have."""
        return {
            (layer, head): {
                part[:, block_id].contiguous().view(torch.uint8).numpy().tobytes()
                for part in self.parts(layer, head)
            }
            for layer, head in itertools.product(range(LAYERS), range(HEADS))
        }

    def take(self, other, block_id, place):
        """Copy a block of another server, byte after byte."""
        data = b"".join(other.blocks.pieces(block_id))
        for piece in self.blocks.pieces(place):
            piece[:], data = data[: piece.nbytes], data[piece.nbytes :]
        assert not data
        self.blocks.replicate(place)


@pytest.mark.parametrize(("tensor", "stages"), DIVISIONS)
@pytest.mark.parametrize(("other_tensor", "other_stages"), DIVISIONS)
def test_every_rank_gets_its_layers_and_heads_from_servers_of_any_size(
    tensor, stages, other_tensor, other_stages
):
    source, target = Server(other_tensor, other_stages, seed=1), Server(tensor, stages, seed=2)
    before = [target.contents(block_id) for block_id in range(NUM_BLOCKS)]
    target.take(source, 1, 3)
    for block_id in range(NUM_BLOCKS):
        wanted = source.contents(1) if block_id == 3 else before[block_id]
        assert target.contents(block_id) == wanted
    assert all(len(found) == 1 for found in target.contents(3).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_blocks_of_every_type_are_copied_with_their_scales(dtype):
    source, target = Server(2, dtype=dtype, seed=1), Server(1, dtype=dtype, seed=2)
    target.take(source, 1, 3)
    assert target.contents(3) == source.contents(1)


@pytest.mark.parametrize(("tensor", "stages"), DIVISIONS)
def test_blocks_are_where_another_process_looks_for_them(tensor, stages):
    blocks = Server(tensor, stages, seed=1).blocks
    for block_id in range(NUM_BLOCKS):
        found = [os.pread(blocks.descriptor, run.size, run.at(block_id).start) for run in blocks.runs]
        assert found == [bytes(piece) for piece in blocks.pieces(block_id)]
        assert len(b"".join(found)) == blocks.block_bytes == LAYERS * 2 * HEADS * SIZE * HEAD * 4


def test_one_rank_has_the_heads_of_a_layer_in_one_piece():
    assert len(Server(1).blocks.pieces(0)) == LAYERS * 2


@pytest.mark.parametrize("tensor", [1, 4])
def test_cleared_blocks_are_zero_on_all_ranks_and_no_others(tensor):
    server = Server(tensor, seed=1)
    before = server.contents(0)
    server.blocks.clear([2, 4])
    for found in (*server.contents(2).values(), *server.contents(4).values()):
        assert found == {bytes(2 * SIZE * HEAD * 4)}
    assert server.contents(0) == before
