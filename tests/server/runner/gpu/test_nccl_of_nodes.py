"""Ranks on GPUs of two nodes meet by the store at the leader's address, and exchange within and between them.

NCCL is played by gloo, GPUs by CPUs: the store, its names and the order of the calls are the real ones.
"""

import functools
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.layers import communicators, parallel
from quire_server.layers.parallel import Communicator, Meeting
from quire_server.network_interface import Interface

CPU = torch.device("cpu")
Places = Callable[[Topology], Meeting]


class NcclByGloo(distributed.ProcessGroupGloo):  # type: ignore[misc,name-defined]  # not in the stubs
    """With NCCL's arguments."""

    Options = object

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        gloo._timeout = timedelta(seconds=60)
        gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]  # not in the stubs
        super().__init__(store, rank, size, gloo)

    def abort(self) -> None:
        """Nothing waits here."""


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that NCCL sees; threads of one process have it in common."""
    seen = dict[str, str]()
    monkeypatch.setattr(parallel.os, "environ", seen)
    monkeypatch.setattr(parallel.atexit, "register", lambda _: None)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NcclByGloo, raising=False)
    monkeypatch.setattr(parallel, "interface_of", lambda address: Interface("eth7", socket.AF_INET))
    monkeypatch.setattr(parallel, "_are_linked", lambda gpus: False)
    monkeypatch.setattr(communicators, "_gpu", lambda topology: CPU)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return seen


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    """Where the ranks of a group meet. All of 127.0.0.0/8 is this machine; ranks of one process have a
    connection to the store each, as processes have.
    """
    network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    yield lambda topology: Meeting(
        tmp_path,
        f"{network}.{1 + topology.rank // topology.node_size}",
        "" if topology.is_leader else f"{network}.1",
    )


def joined(places: Places, topology: Topology, done: threading.Barrier) -> list[Tensor]:
    """What a rank gets: the sum of its stage, the states of the stage before, and on rank 0 the logits."""
    name = communicators.choose(topology.nodes, is_gpu=True)
    made: Communicator = communicators.join(name, topology, places(topology), None)
    part = torch.full((2, 4), float(topology.rank))
    found = [made.all_reduce(part.clone())]
    if not topology.is_first_stage:
        found.append(made.recv((2, 4), torch.float32, topology.previous))
    if not topology.is_last_stage:
        made.send(part, topology.next)
    gathered = made.gather_to_leader(part) if topology.is_last_stage else part
    if topology.rank == topology.head_rank and topology.pipeline > 1:
        made.send(gathered, 0)
    if topology.is_leader and topology.pipeline > 1:
        gathered = made.recv((2, 4 * topology.tensor), torch.float32, topology.head_rank)
    done.wait(60)  # what was sent arrives while its sender is there
    return [*found, gathered]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "nodes"), [(2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 3, 2), (4, 1, 2)]
)
def test_ranks_of_two_nodes_add_their_parts_and_hand_on_their_states(
    environ: dict[str, str], places: Places, tensor: int, pipeline: int, nodes: int
) -> None:
    ranks = [Topology(tensor, rank, pipeline, nodes) for rank in range(tensor * pipeline)]
    done = threading.Barrier(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        results = list(pool.map(functools.partial(joined, places, done=done), ranks))
    for topology, found in zip(ranks, results, strict=True):
        first = topology.stage * tensor
        assert found[0][0, 0] == sum(range(first, first + tensor)), "of the stage's own ranks"
        assert topology.is_first_stage or found[1][0, 0] == topology.previous
    last = [float(rank) for rank in range(tensor * (pipeline - 1), tensor * pipeline) for _ in range(4)]
    assert results[0][-1][0].tolist() == last, "side by side on rank 0"
    assert environ["NCCL_SOCKET_IFNAME"] == "=eth7" and environ["NCCL_SOCKET_FAMILY"] == "AF_INET"
    assert environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_gpus_of_another_kind_on_another_node_are_refused_by_all_ranks_before_anything_is_loaded(
    environ: dict[str, str], places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {0: (9, 0), 1: (8, 0)}
    monkeypatch.setattr(communicators, "_gpu", lambda topology: topology.rank // topology.node_size)
    monkeypatch.setattr(torch.cuda, "get_device_capability", kinds.__getitem__)

    def refused(rank: int) -> str:
        topology = Topology(4, rank, 1, 2)
        with pytest.raises(ConfigError) as error:
            communicators.join(communicators.NCCL, topology, places(topology), None)
        return str(error.value)

    with ThreadPoolExecutor(4) as pool:
        (said,) = set(pool.map(refused, range(4)))
    host = socket.gethostname()
    assert f"capabilities 9.0 on {host} and 8.0 on {host}, and ranks must compute alike" in said
