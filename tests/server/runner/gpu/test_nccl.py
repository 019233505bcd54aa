"""Ranks on GPUs join in the order that NCCL and graphs need, and choose the one-shot kernel by size alone.
With a process group that notes its calls, in place of NCCL.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import DistBackendError

from quire_kernels import OneShotPlace, one_shot_region_bytes
from quire_server.core.topology import Topology
from quire_server.layers import communicators, parallel
from quire_server.layers.parallel import CollectiveError, GpuStages, Meeting, Nccl, SingleRank
from quire_server.network_interface import Interface

CPU = torch.device("cpu")
PLACE = OneShotPlace.of([0, 0], 0, torch.zeros(one_shot_region_bytes(2), dtype=torch.uint8))
INTERFACES = {"10.1.2.3": Interface("eth7", socket.AF_INET)}
SMALL, LARGE = torch.ones(4, 2048), torch.ones(64, 4096)  # 32 KiB and 1 MiB


class Work:
    """A call that was queued: a wait without a limit would stop nothing but the device's stream."""

    def __init__(self, fault: Exception | None) -> None:
        self._fault = fault

    def wait(self, *timeout: timedelta) -> None:
        assert timeout == (), "with a limit the host would wait, within a capture, too"
        if self._fault is not None:
            raise self._fault

    def is_completed(self) -> bool:
        return False


class Group:
    """As torch's process group, for rank 0 of two whose parts are equal."""

    def __init__(self, log: list[str], fault: Exception | None = None) -> None:
        self._log, self.fault = log, fault

    def allreduce(self, parts: list[Tensor]) -> Work:
        self._log.append("all-reduce")
        parts[0].mul_(2)
        return Work(self.fault)

    def gather(self, results: list[list[Tensor]], parts: list[Tensor], options: Any) -> Work:
        self._log.append("gather")
        for result in results[0] if results else ():
            result.copy_(parts[0])
        return Work(self.fault)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        self._log.append(f"send to {rank}")
        return Work(self.fault)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        self._log.append(f"receive from {rank}")
        tensors[0].fill_(rank)
        return Work(self.fault)

    def abort(self) -> None:
        self._log.append("abort")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def one_shot(part: Tensor, place: OneShotPlace) -> Tensor:
        made.append("one shot")
        return part.mul_(2)

    monkeypatch.setattr(parallel, "one_shot_all_reduce", one_shot)
    return made


def test_small_sums_are_made_by_the_one_shot_kernel_and_all_others_by_nccl(log: list[str]) -> None:
    ranks = Nccl(Group(log), Topology(2), PLACE)
    for part in (SMALL, LARGE, SMALL.double()):
        assert torch.equal(ranks.all_reduce(part.clone()), 2 * part)
    assert log == ["one shot", "all-reduce", "all-reduce"]
    assert ranks.calls == 3 and ranks.bytes == SMALL.nbytes + LARGE.nbytes + 2 * SMALL.nbytes
    assert ranks.without_one_shot().all_reduce(SMALL.clone()).shape == SMALL.shape
    assert log[3:] == ["all-reduce"] and ranks.has_one_shot and not ranks.without_one_shot().has_one_shot


def test_the_leader_has_all_parts_side_by_side(log: list[str]) -> None:
    part = torch.arange(6.0).view(2, 3)
    assert torch.equal(Nccl(Group(log), Topology(2), None).gather_to_leader(part), part.repeat(1, 2))
    assert Nccl(Group(log), Topology(2, 1), None).gather_to_leader(part) is part


def test_an_error_of_nccl_is_a_lost_rank_and_one_of_the_device_is_not(log: list[str]) -> None:
    lost = DistBackendError("ncclRemoteError")
    with pytest.raises(CollectiveError, match="did not take part in an exchange: ncclRemoteError"):
        Nccl(Group(log, lost), Topology(2), None).all_reduce(LARGE.clone())
    with pytest.raises(RuntimeError, match="^CUDA error"):
        Nccl(Group(log, RuntimeError("CUDA error: an illegal access")), Topology(2), None).all_reduce(
            LARGE.clone()
        )


class Machine:
    """Two GPUs, as ``Nccl.join`` sees them. ``links``: of NVLink between them."""

    def __init__(self, log: list[str], links: int = 18) -> None:
        self.log, self.links = log, links
        self.environ = dict(os.environ)
        self.at_exit: list[Callable[[], None]] = []
        self.topology, self.interface = Topology(2), "=lo"
        self.connects: Callable[[int, int], bool] = lambda one, other: one != other


def join(monkeypatch: pytest.MonkeyPatch, path: Path, machine: Machine, shares: bool = True) -> Nccl:
    """As rank 0 of two. ``shares``: the driver lets GPUs share memory."""
    log, environ = machine.log, machine.environ

    def process_group(store: Any, rank: int, size: int, options: Any) -> Group:
        log.append(f"NCCL, rank {rank} of {size}")
        assert environ["NCCL_SOCKET_IFNAME"] == machine.interface, "set before NCCL reads it"
        return Group(log)

    class Memory:
        """As torch's symmetric memory."""

        buffer_ptrs = (0, 0)

        @staticmethod
        def set_group_info(name: str, rank: int, size: int, store: Any) -> None:
            assert (rank, size) == (0, 2)

        @staticmethod
        def empty_strided_p2p(size: Any, stride: Any, dtype: Any, device: Any, name: str) -> Tensor:
            if not shares:
                raise RuntimeError("CUDA driver error: operation not supported")
            return torch.full(size, 7, dtype=dtype, device=device)

        @staticmethod
        def rendezvous(region: Tensor, name: str) -> Any:
            assert not region.any(), "the flags are zero before another rank sees them"
            log.append("share")
            return Memory

    links = SimpleNamespace(matrix=[[machine.links] * 4] * 4)
    process_group.Options = object  # type: ignore[attr-defined]  # a stub of the class
    monkeypatch.setattr(parallel.os, "environ", environ)
    monkeypatch.setattr(parallel.atexit, "register", machine.at_exit.append)
    monkeypatch.setattr(parallel.distributed, "ProcessGroupNCCL", process_group, raising=False)
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_SymmetricMemory", Memory)
    monkeypatch.setattr(c10d, "_detect_dma_connectivity", lambda kind, name: links)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append("device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", machine.connects)
    meeting = Meeting(path)
    if machine.topology.nodes > 1:
        meeting = Meeting(path, "10.1.2.3", "10.1.2.4")
        machine.interface = "=eth7"
        monkeypatch.setattr(parallel, "interface_of", lambda address: INTERFACES[address])
        monkeypatch.setattr(Meeting, "store", lambda *_: distributed.HashStore())
    return Nccl.join(machine.topology, meeting, CPU)


BEGIN, BY_NCCL = ["device", "NCCL, rank 0 of 2"], ["all-reduce", "gather", "wait"]


def test_ranks_join_over_loopback_and_use_all_connections_before_anything_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    ranks = join(monkeypatch, tmp_path, Machine(log))
    agreed = ["all-reduce"]  # after which all ranks have memory whose flags are zero
    assert log == [*BEGIN, *BY_NCCL, "wait", "share", *agreed, "one shot", "gather", "wait"]
    assert (ranks.calls, ranks.bytes, ranks.has_one_shot) == (0, 0, True)


def test_gpus_that_nvlink_does_not_connect_use_nccl_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    ranks = join(monkeypatch, tmp_path, Machine(log, links=0))
    assert not ranks.has_one_shot and log == [*BEGIN, *BY_NCCL, *BY_NCCL]


def test_gpus_that_may_share_no_memory_use_nccl_alone_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = join(monkeypatch, tmp_path, Machine(log), shares=False)
    assert not ranks.has_one_shot and log == [*BEGIN, *BY_NCCL, "all-reduce", *BY_NCCL]
    assert "operation not supported" in caplog.records[0].__dict__["why"]


def test_where_one_rank_shares_no_memory_none_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    ranks = Nccl(Group(log), Topology(3), None)  # of three ranks this and another one have memory
    assert ranks._agreed(PLACE, CPU) is None
    assert Nccl(Group(log), Topology(2), None)._agreed(PLACE, CPU) is PLACE


def test_a_rank_that_ends_waits_for_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    machine = Machine(log)
    ranks = join(monkeypatch, tmp_path, machine)
    log.clear()
    (end,) = machine.at_exit
    end()
    assert log == ["abort"], "a destroyed communicator would wait for a peer that is gone"
    assert ranks._one_shot is not None
    assert (ranks._one_shot.flags > 1 << 29).all(), "as if all others had come"


def test_the_communicator_is_chosen_by_where_the_ranks_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[torch.device] = []
    monkeypatch.setattr(Nccl, "join", lambda topology, meeting, device: joined.append(device))
    communicators.join(communicators.choose(is_gpu=True), Topology(2, 1), Meeting(tmp_path), None)
    assert joined == [torch.device("cuda", 1)]
    assert communicators.choose(is_gpu=False) != communicators.choose(is_gpu=True)


class Hosts(Group):
    """As gloo's process group, which waits on the host."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        super().recv(tensors, rank, tag)
        return SimpleNamespace(wait=lambda timeout: self._log.append(f"wait {timeout.seconds} s"))


def stages(
    monkeypatch: pytest.MonkeyPatch, path: Path, log: list[str], hosts: list[str], topology: Topology
) -> tuple[GpuStages, Group, list[Callable[[], None]]]:
    """A rank of a pipeline, NCCL's group of all ranks, and what runs at the process's end."""
    group, at_exit = Group(log), list[Callable[[], None]]()

    def process_group(store: Any, rank: int, size: int, options: Any) -> Group:
        log.append(f"NCCL, rank {rank} of {size}")
        return group

    process_group.Options = object  # type: ignore[attr-defined]  # a stub of the class
    monkeypatch.setattr(parallel.os, "environ", dict(os.environ))
    monkeypatch.setattr(parallel.atexit, "register", at_exit.append)
    monkeypatch.setattr(parallel.distributed, "ProcessGroupNCCL", process_group, raising=False)
    monkeypatch.setattr(parallel, "_join_gloo", lambda *_: Hosts(hosts))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append("device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    return GpuStages(SingleRank(), topology, Meeting(path), CPU), group, at_exit


def test_states_go_on_by_nccl_and_logits_come_back_through_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    hosts = list[str]()
    middle, _, _ = stages(monkeypatch, tmp_path, log, hosts, Topology(2, 2, 3))
    joined = ["device", "NCCL, rank 2 of 6", "receive from 0", "send to 4", "wait"]
    assert log == joined, "each connection is used before anything is measured or captured"
    assert (middle.calls, middle.bytes, hosts) == (0, 0, [])
    assert torch.equal(middle.recv((2, 4), torch.float32, 0), torch.zeros(2, 4))
    middle.send(SMALL, 4)
    assert log[5:] == ["receive from 0", "send to 4"] and not hosts
    assert (middle.calls, middle.bytes) == (2, 32 + SMALL.nbytes)
    log.clear()
    last, _, _ = stages(monkeypatch, tmp_path, log, hosts, Topology(1, 2, 3))
    first, _, _ = stages(monkeypatch, tmp_path, log, hosts, Topology(1, 0, 3))
    log.clear()
    last.send(SMALL, 0)
    assert torch.equal(first.recv((1, 2), torch.float32, 2), torch.full((1, 2), 2.0))
    assert not log and hosts == ["send to 0", "receive from 2", "wait 300 s"]


def test_a_stage_that_is_lost_or_has_left_is_an_error_of_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    ranks, group, at_exit = stages(monkeypatch, tmp_path, log, [], Topology(1, 1, 3))
    group.fault = DistBackendError("ncclRemoteError")
    with pytest.raises(CollectiveError, match="did not take part in an exchange: ncclRemoteError"):
        ranks.recv((1, 2), torch.float32, 0)
    ranks.abort()
    for end in at_exit:
        end()
    assert log.count("abort") == 1, "a communicator that is destroyed would wait for its peers"
    for exchange in (lambda: ranks.send(SMALL, 2), lambda: ranks.recv((1,), torch.float32, 0)):
        with pytest.raises(CollectiveError, match="has left"):
            exchange()


def test_ranks_of_a_further_stage_share_memory_by_their_number_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    asked = list[tuple[int, int]]()
    machine = Machine(log)
    machine.topology = Topology(2, 2, 2)
    machine.connects = lambda one, other: asked.append((one, other)) or True
    join(monkeypatch, tmp_path, machine)
    assert log[:2] == BEGIN and set(asked) == {(2, 3), (3, 2)}


def test_stages_of_gpus_are_joined_on_the_gpu_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = list[tuple[type[object], torch.device]]()
    monkeypatch.setattr(Nccl, "join", lambda topology, meeting, device: SingleRank())
    monkeypatch.setattr(
        communicators,
        "GpuStages",
        lambda of_stage, topology, meeting, device: joined.append((type(of_stage), device)),
    )
    for topology in (Topology(1, 2, 3), Topology(2, 3, 2)):
        communicators.join(communicators.choose(is_gpu=True), topology, Meeting(tmp_path), None)
    assert [device for _, device in joined] == [torch.device("cuda", 2), torch.device("cuda", 3)]


def test_ranks_of_several_nodes_join_at_the_interface_of_their_pods_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    machine = Machine(log)
    machine.topology = Topology(2, 0, 2, 2)
    join(monkeypatch, tmp_path, machine)
    assert machine.environ["NCCL_SOCKET_IFNAME"] == "=eth7", "that one and no other whose name begins so"
    assert machine.environ["NCCL_SOCKET_FAMILY"] == "AF_INET", "it may have addresses of both"


@pytest.mark.parametrize(
    ("topology", "gpus"),
    [
        (Topology(2, 0, 2, 2), {(0, 1), (1, 0)}),
        (Topology(2, 2, 2, 2), {(0, 1), (1, 0)}),  # of the second node
        (Topology(2, 4, 3, 2), {(1, 2), (2, 1)}),  # the second and third GPU of the second node
        (Topology(2, 2, 3, 2), None),  # the last of the first node, and the first of the second
        (Topology(2, 0, 1, 2), None),
    ],
)
def test_small_sums_are_made_by_the_one_shot_kernel_only_where_all_ranks_of_a_stage_are_on_one_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
    topology: Topology,
    gpus: set[tuple[int, int]] | None,
) -> None:
    asked, machine = set[tuple[int, int]](), Machine(log)
    machine.topology = topology
    machine.connects = lambda one, other: not asked.add((one, other))
    ranks = join(monkeypatch, tmp_path, machine)
    assert ranks.has_one_shot == (gpus is not None) and asked == (gpus or set())
    log.clear()
    assert torch.equal(ranks.all_reduce(SMALL.clone()), 2 * SMALL)
    assert log == (["all-reduce"] if gpus is None else ["one shot"])
