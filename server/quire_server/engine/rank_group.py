"""Rank 0's connections to the other ranks of its model: the handshake, then steps out and echoes in.

The ranks fail together: one that does not echo a step in time, or echoes another one, ends the server by a
RankLostError that names it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from quire_server.config import ServeConfig
from quire_server.core.rank_step import NO_WORK, AdapterReport, Echo, EchoStatus, RankStep, Work
from quire_server.engine import (
    rank_admission,
    rank_auth,
    rank_channel,
    rank_endpoint,
    rank_watch,
    step_codec,
)
from quire_server.engine.codec import CodecError
from quire_server.engine.rank_admission import Admission
from quire_server.engine.rank_auth import RankAuthError
from quire_server.engine.rank_channel import (
    Agreed,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Handshake,
    Hello,
    Identity,
    Loaded,
    Loading,
    Patience,
    Prepared,
    Refused,
    Welcome,
)
from quire_server.engine.rank_endpoint import RankListener
from quire_server.engine.rank_faults import RankFaults
from quire_server.engine.step_codec import StepEncoder
from quire_server.errors import ConfigError, MixedRevisionError, RankLostError
from quire_server.layers import communicators
from quire_server.layers.parallel import DEADLINE, STAGE_DEADLINE, Communicator, Meeting
from quire_server.runner import fingerprint
from quire_server.runner.model_runner import is_gpu
from quire_server.runner.ranks import PassOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T", Loaded, Prepared)
_MAX_HOST_CHARS = 253
_GRACE_SECONDS = 0.5  # for ranks that noticed the loss of another one a moment later


class RankGroup:
    """The other ranks, as rank 0 sees them."""

    def __init__(
        self,
        channels: Mapping[int, Channel],
        on_lost: Callable[[int], object] = bool,
        on_step: Callable[[int], object] = bool,
        faults: RankFaults | None = None,
        incarnation: str = "",
        deadline: float = DEADLINE,
        on_echo: Callable[[int, int, Work], object] = lambda rank, number, work: None,
    ) -> None:
        """``on_lost``: called with the first rank that did not answer, before the error. ``on_step``: called
        with the number of each step that was sent. ``deadline``: seconds for a rank to echo a pass.
        ``on_echo``: called for each rank with the number of a step that it has executed, and its work.
        """
        self._channels = channels
        self._on_lost, self._on_step = on_lost, on_step
        self._on_echo, self._faults, self._deadline = on_echo, faults, deadline
        self._encoder = StepEncoder(incarnation)
        self._sent: deque[tuple[int, int]] = deque()  # (sequence, digest) of each pass without echoes

    @classmethod
    def gather(
        cls,
        run_dir: Path,
        settings: ServeConfig,
        on_lost: Callable[[int], None],
        on_step: Callable[[int], None],
        on_echo: Callable[[int, int, Work], None],
        faults: RankFaults,
    ) -> tuple[RankGroup, Communicator]:
        """Wait until all other ranks have connected, and join them."""
        topology, on_gpus = settings.topology(0), is_gpu(settings.device)
        kind = communicators.choose(settings.nodes, is_gpu=on_gpus)
        with _listening(settings, run_dir, topology.size) as listener:
            admission = Admission(listener, identity(settings, os.environ), topology.size)
            channels = admission.admit(settings.startup_timeout_seconds)
        if settings.nodes > 1:
            rank_watch.start({rank: channel.fileno() for rank, channel in channels.items()}, run_dir)
        deadline = STAGE_DEADLINE if topology.pipeline > 1 or on_gpus else DEADLINE
        with communicators.shared(kind, topology) as descriptors:
            group = cls(channels, on_lost, on_step, faults, admission.incarnation, deadline, on_echo)
            group._say(
                Welcome(kind, admission.incarnation),
                lambda rank: descriptors[settings.topology(rank).stage],
            )
            meeting = _meeting(settings, run_dir, 0)
            return group, communicators.join(kind, topology, meeting, descriptors[0])

    def agree_on_blocks(
        self,
        num_blocks: int,
        on_progress: Callable[[], None],
        timeout: float,
        shared: int | None = None,
        on_loaded: Callable[[int, str], object] = lambda rank, host: None,
    ) -> int:
        """The smallest number of KV blocks that any rank has room for, which all ranks are sent, with the
        descriptor of the memory that they share for them. ``on_loaded``: called with each rank that has
        loaded its weights, and its host.
        """
        smallest = num_blocks
        for rank in self._channels:
            loaded = self._hear(rank, Loaded, timeout, on_progress)
            on_loaded(rank, loaded.host[:_MAX_HOST_CHARS])
            smallest = min(smallest, loaded.num_blocks)
        self._say(Agreed(smallest), lambda _: shared)
        return smallest

    def wait_prepared(self, timeout: float) -> bool:
        """Wait until all ranks can take steps. Whether all have a recorded decode."""
        prepared = [self._hear(rank, Prepared, timeout) for rank in self._channels]
        return all(each.can_replay for each in prepared)

    def _say(self, message: Handshake, descriptor_of: Callable[[int], int | None] = lambda _: None) -> None:
        """Send to all other ranks, each with its descriptor. Where one has ended, the others learn it by the
        end of their connection.
        """
        for rank, channel in self._channels.items():
            try:
                channel.say(message, DEADLINE, descriptor=descriptor_of(rank))
            except (ChannelClosedError, ChannelTimeoutError):
                for each in self._channels.values():
                    each.close()
                raise RankLostError(f"Rank {rank} ended while the ranks joined. {_REMEDY}") from None

    def _hear(self, rank: int, kind: type[T], timeout: float, on_progress: Callable[[], object] = bool) -> T:
        """The next message of a rank other than its progress."""
        while True:
            try:
                message = self._channels[rank].hear(timeout)
            except (ChannelClosedError, ChannelTimeoutError, CodecError):
                raise RankLostError(f"Rank {rank} ended while the model was loaded. {_REMEDY}") from None
            if isinstance(message, kind):
                return message
            if not isinstance(message, Loading):
                raise RankLostError(f"Rank {rank} sent {type(message).__name__}. {_REMEDY}")
            on_progress()

    def send(self, message: RankStep) -> None:
        """Send the next pass to all other ranks."""
        body = self._encoder.encode(message)
        self._sent.append((self._encoder.sequence, self._encoder.digest))
        for rank, channel in self._channels.items():
            try:
                channel.send(body, self._deadline)
            except (ChannelClosedError, ChannelTimeoutError):
                raise self._lost(self._encoder.sequence, [rank], self._deadline) from None
        self._on_step(self._encoder.sequence)
        if self._faults is not None:
            self._faults.before_exchanges(self._encoder.sequence)

    def collect(
        self, *, is_lost: bool = False, has_output: bool = False, work: Work = NO_WORK
    ) -> PassOutcome:
        """Wait until all other ranks have executed the oldest pass without echoes. With its output they have
        to within the deadline of one stage. ``work``: what rank 0 did for it.

        All are looked at in turns: a rank may have waited in vain for one of its stage, which is late, and
        for which alone rank 0 would wait for minutes.
        """
        sequence, digest = self._sent.popleft()
        if self._faults is not None:
            self._faults.after_exchanges(sequence)
        self._on_echo(0, sequence, work)
        seconds = min(DEADLINE, self._deadline) if has_output else self._deadline
        echoes, closed, waited = list[Echo](), list[int](), list[int]()
        reports = list[tuple[int, AdapterReport]]()
        missing, left, is_last_turn = dict(self._channels), seconds, is_lost
        while missing:
            turn = Patience(_GRACE_SECONDS if is_last_turn else min(DEADLINE, left))
            left -= DEADLINE
            for rank, channel in tuple(missing.items()):
                try:
                    echo = self._receive_echo(rank, channel, turn, (sequence & 0xFFFFFFFF, digest))
                except ChannelTimeoutError:
                    continue
                del missing[rank]
                if echo is None:
                    closed.append(rank)
                else:
                    self._on_echo(rank, sequence, echo.work)
                    echoes.append(echo)
                    reports += ((rank, report) for report in echo.adapters)
                    waited += [rank] * (echo.status is EchoStatus.LOST_PEER)
            if is_last_turn or (left <= 0 and not (closed or waited)):
                break
            is_last_turn = bool(closed or waited)
        if closed or missing:
            raise self._lost(sequence, [*closed, *missing], seconds)
        if waited and not is_lost:  # rank 0 itself has not waited: its part is queued on a GPU
            raise RankLostError(
                f"Step {sequence}: rank {waited[0]} waited in vain for another rank's part. {_REMEDY}"
            )
        is_out_of_memory = any(echo.status is EchoStatus.OUT_OF_MEMORY for echo in echoes)
        copied = tuple(echo.copied for echo in echoes if echo.copied is not None)
        return PassOutcome(is_out_of_memory, copied, tuple(reports))

    def _receive_echo(
        self, rank: int, channel: Channel, patience: Patience, wanted: tuple[int, int]
    ) -> Echo | None:
        """The echo of a rank, of the (sequence, digest) wanted; None where it has gone. Raises
        ChannelTimeoutError.
        """
        try:
            echo = step_codec.decode_echo(channel.receive(step_codec.MAX_ECHO_BYTES, patience))
        except ChannelClosedError:
            return None
        except CodecError as error:
            raise RankLostError(f"Rank {rank} echoed no step ({error}). {_REMEDY}") from None
        if (echo.sequence, echo.digest) != wanted:
            raise RankLostError(f"Rank {rank} executed another step than rank 0 sent. {_REMEDY}")
        return echo

    def _lost(self, sequence: int, ranks: list[int], seconds: float) -> RankLostError:
        self._on_lost(ranks[0])
        names = "rank " + ", ".join(map(str, ranks))
        return RankLostError(
            f"Step {sequence} was not echoed by {names} of {len(self._channels) + 1} within "
            f"{seconds:g} s. {_REMEDY}"
        )


_REMEDY = "The pod restarts; if it comes back, look at the node's CPU and memory, and report it with the log."


def identity(settings: ServeConfig, environ: Mapping[str, str]) -> Identity:
    """This process's, which those of all ranks have to equal."""
    return Identity(
        protocol=step_codec.VERSION,
        revision=environ.get("QUIRE_REVISION", ""),
        image=fingerprint.code_digest(),
        model=fingerprint.model_digest(settings.model),
        arguments=hashlib.sha256(str(settings.common).encode()).hexdigest(),
    )


class Joined(NamedTuple):
    """What another rank has when it was taken in."""

    channel: Channel
    communicator: Communicator
    incarnation: str


def join(run_dir: Path, settings: ServeConfig, rank: int, own: Identity) -> Joined:
    """As another rank, connect to rank 0 and join."""
    timeout = settings.startup_timeout_seconds
    channel = _connect(settings, run_dir, timeout)
    channel.say(Hello(rank, "", own))
    answer, descriptor = channel.hear_with_descriptor(timeout)
    if not isinstance(answer, Welcome):
        channel.close()
        raise _refused(answer) if isinstance(answer, Refused) else CodecError("expected a welcome")
    try:
        _check_device(answer, is_gpu(settings.device), rank)
    except ConfigError:
        channel.close()
        raise
    meeting = _meeting(settings, run_dir, rank)
    communicator = communicators.join(answer.communicator, settings.topology(rank), meeting, descriptor)
    if descriptor is not None:
        os.close(descriptor)
    return Joined(channel, communicator, answer.incarnation)


def _check_device(answer: Welcome, is_on_gpu: bool, rank: int) -> None:
    """With --device auto each node looks for GPUs of its own."""
    if (answer.communicator == communicators.NCCL) != is_on_gpu:
        own, others = ("a GPU", "a CPU") if is_on_gpu else ("a CPU", "a GPU")
        raise ConfigError(
            f"Rank 0 computes on {others}, and rank {rank} on {socket.gethostname()} on {own}: give all "
            "nodes of the group GPUs, or set --device cpu."
        )


def _refused(answer: Refused) -> MixedRevisionError | RankLostError:
    if answer.reason == rank_admission.MIXED_REVISION:
        return MixedRevisionError(
            f"The ranks of the model are not of one revision: {answer.message}. The pod restarts; if it "
            "comes back, look whether the image or the model changes while the server starts."
        )
    return RankLostError(f"Rank 0 refused a rank ({answer.reason}): {answer.message}. {_REMEDY}")


@contextmanager
def _listening(settings: ServeConfig, run_dir: Path, backlog: int) -> Iterator[socket.socket | RankListener]:
    """Where the other ranks connect: within one node at a socket of the run directory."""
    if settings.nodes > 1:
        key = partial(rank_auth.key_of, settings.peer_key_dir)
        try:
            opened = RankListener(settings.pod_address or "", rank_endpoint.PORT, key)
        except OSError as error:
            raise ConfigError(
                f"The other nodes cannot connect to --pod-address {settings.pod_address}, port "
                f"{rank_endpoint.PORT}, which cannot be listened on: {error.strerror}. Give an address of "
                "this node, on which the port is free."
            ) from error
        with closing(opened) as listener:
            yield listener
    else:
        local = rank_channel.listen(run_dir, backlog)
        yield local
        rank_channel.stop_listening(local, run_dir)


def _connect(settings: ServeConfig, run_dir: Path, timeout: float) -> Channel:
    if settings.nodes == 1:
        return Channel.connect(run_dir, timeout)
    key, leader = partial(rank_auth.key_of, settings.peer_key_dir), settings.leader_address or ""
    try:
        return Channel(rank_endpoint.connect(leader, rank_endpoint.PORT, key, timeout))
    except (RankAuthError, TimeoutError) as error:
        raise RankLostError(
            f"The leader at {leader} cannot be joined: {error}. The pod restarts; if it comes back, look at "
            "the leader's pod, at the network between the nodes, and whether all pods mount the same key."
        ) from None


def _meeting(settings: ServeConfig, run_dir: Path, rank: int) -> Meeting:
    if settings.nodes == 1:
        return Meeting(run_dir)
    leader = settings.leader_address if rank else ""
    return Meeting(run_dir, settings.pod_address or "", leader or "")
