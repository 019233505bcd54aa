"""A model divided among ranks in one process: rank 0's runner, and the others that follow it on threads."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server import fault_injection
from quire_server.core.topology import Topology
from quire_server.engine import rank
from quire_server.engine.rank_channel import Channel, ChannelClosedError
from quire_server.engine.rank_faults import RankFaults
from quire_server.engine.rank_group import RankGroup
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.decoder import Decoder
from quire_server.runner.kv_offload import OffloadWorker
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.rank_executor import FollowerRunner
from quire_server.runner.ranks import SINGLE, Membership
from tests.server.models.lockstep import ThreadRanks

_DEFAULTS = {"dtype": "float32", "quantization": "none", "num_blocks_override": 200}


class Ranks:
    """``runner`` is rank 0's, to be used as any other. ``exchange``: what the ranks have exchanged.
    ``fault``: injected into ranks, as in QUIRE_FAULT.
    """

    def __init__(
        self, directory: Path, tensor: int, pipeline: int = 1, fault: str = "", **options: object
    ) -> None:
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        settings = RunnerConfig(**(_DEFAULTS | sizes | options))  # type: ignore[arg-type]  # mixed values
        self.exchange, self.pipeline = ThreadRanks(tensor, pipeline), pipeline
        pairs = {number: socket.socketpair() for number in range(1, tensor * pipeline)}
        self.followers: list[FollowerRunner] = []
        self._threads = []
        for number, (_, far) in pairs.items():
            follower = FollowerRunner.load(directory, settings, lambda *_: None, self._place(number))
            self.followers.append(follower)
            arguments = (Channel(far), follower, _faults(fault, number))
            thread = threading.Thread(target=_follow, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)
        self.channels = {number: Channel(near) for number, (near, _) in pairs.items()}
        group = RankGroup(self.channels, faults=_faults(fault, 0))
        self.runner = ModelRunner.load(
            directory, settings, lambda *_: None, ranks=self._place(0), followers=group
        )

    def _place(self, number: int) -> Membership:
        topology = Topology(self.exchange.size, number, self.pipeline)
        return Membership(topology, self.exchange.communicators[number], SINGLE.agree_on_blocks)

    @property
    def models(self) -> list[Decoder]:
        """Each rank's part."""
        return [self.runner._model, *(follower._rank._model for follower in self.followers)]

    @property
    def tiers(self) -> list[OffloadWorker]:
        """Each rank's copies of its part of the KV blocks."""
        workers = [self.runner._offload, *(follower._offload for follower in self.followers)]
        return [worker for worker in workers if worker is not None]

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for thread in self._threads:
            thread.join()
        for worker in self.tiers:
            worker.close()


def _faults(fault: str, number: int) -> RankFaults:
    return RankFaults(fault_injection.parse({"QUIRE_FAULT": fault, "QUIRE_ALLOW_FAULTS": "1"}), number)


def _follow(channel: Channel, follower: FollowerRunner, faults: RankFaults) -> None:
    try:
        rank.follow(channel, follower, faults=faults)
    except ChannelClosedError:
        channel.close()


def lack_memory(
    monkeypatch: pytest.MonkeyPatch, model: Decoder, place: str, layer: int, more_than: int
) -> list[int]:
    """Fail this rank's passes of more tokens by allocating 1 EiB, "before the pass" or "within the pass", in
    this layer. Returns the token counts of the failed passes.
    """
    states, whole_layer, failed = model.states, model.layers[layer], list[int]()
    count = 0

    def allocate(here: str) -> None:
        if count > more_than and place == here:
            failed.append(count)
            torch.empty(1 << 60, dtype=torch.uint8)

    def hungry(batch: ForwardBatch, *rest: Any) -> Any:
        nonlocal count
        count = len(batch.token_ids)
        allocate("before the pass")
        return states(batch, *rest)

    def hungry_layer(*arguments: Any) -> Any:
        allocate("within the pass")
        return whole_layer(*arguments)

    hungry_layer.rope = whole_layer.rope  # type: ignore[attr-defined]  # a function in place of a module
    layers: list[Any] = [*model.layers]
    layers[layer] = hungry_layer
    monkeypatch.setattr(model, "states", hungry)
    monkeypatch.setattr(model, "layers", layers)
    return failed
