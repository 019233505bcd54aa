"""Another rank of the engine than the first: `python -m quire_server.engine.rank RANK RUN_DIR MODEL [flags]`.

Loads its part of the model, then executes the steps that rank 0 sends, and decides nothing.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: what is imported stays, and walking it takes a tenth of the start

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire_server import config, fault_injection, log, termination
from quire_server.config import ServeConfig
from quire_server.core.rank_step import Echo, EchoStatus
from quire_server.engine import loading, rank_group, rank_watch, step_codec
from quire_server.engine.codec import CodecError
from quire_server.engine.rank_channel import (
    Agreed,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Loaded,
    Loading,
    Prepared,
)
from quire_server.engine.rank_faults import RankFaults
from quire_server.engine.rank_group import Joined
from quire_server.engine.step_codec import StepDecoder
from quire_server.errors import RankLostError
from quire_server.health.heartbeat import SharedState
from quire_server.runner.model_runner import device_of
from quire_server.runner.rank_executor import FollowerRunner
from quire_server.runner.ranks import Membership

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 1.0
# Rank 0 has the reason of an end. If it says nothing for so long, it is the one that does not run.
_LEADER_SECONDS = 1.0


def main(argv: list[str]) -> int:
    """Join, load, follow. A failure is left in the run directory for the supervisor."""
    rank, run_dir = int(argv[0]), Path(argv[1])
    settings = config.parse_args(argv[2:], os.environ)
    log.configure(f"rank {rank}", settings.log_level)
    state = SharedState.open(run_dir)
    state.beat_by_thread(rank)
    try:
        faults = RankFaults(fault_injection.parse(os.environ), rank)
        joined, runner = _load(settings, run_dir, rank, faults)
        if 0 not in settings.local_ranks:  # it may wait for minutes for another stage, and hear nothing
            rank_watch.start({0: joined.channel.fileno()}, run_dir)
        gc.collect()
        gc.freeze()
        follow(joined.channel, runner, partial(state.write_step, rank), faults, joined.incarnation)
    except ChannelClosedError:
        # Rank 0 has ended, and the supervisor will end this process. It reports the child that ends first,
        # which has to be rank 0: that one has the reason.
        time.sleep(_LEADER_SECONDS)
        return 1
    except Exception as error:  # the process boundary: every error becomes a reason and an exit code
        failure = termination.failure_of(error)
        logger.exception("a rank failed", extra={"reason": failure.reason.value, "rank": rank})
        termination.leave_failure(run_dir, failure)
        return failure.exit_code
    return 0


def _load(
    settings: ServeConfig, run_dir: Path, rank: int, faults: RankFaults
) -> tuple[Joined, FollowerRunner]:
    topology, options = settings.topology(rank), loading.runner_config(settings)
    device = device_of(options, topology)
    own = faults.identity(rank_group.identity(settings, os.environ))
    joined = rank_group.join(run_dir, settings, rank, own)
    channel, timeout = joined.channel, settings.startup_timeout_seconds

    def agree(num_blocks: int, _: int | None) -> tuple[int, int | None]:
        channel.say(Loaded(num_blocks, socket.gethostname()))
        agreed, shared = channel.hear_with_descriptor(timeout)
        if not isinstance(agreed, Agreed):
            raise CodecError("expected the number of blocks")
        return agreed.num_blocks, shared

    ranks = Membership(topology, joined.communicator, agree)
    progress = _progress(channel)
    runner = FollowerRunner.load(settings.model, options, progress, ranks, device)
    runner.capture(progress)
    channel.say(Prepared(runner.can_replay))
    return joined, runner


def _progress(channel: Channel) -> Callable[[int, int], None]:
    """Reports to rank 0 now and then that loading goes on."""
    last = 0.0

    def progress(loaded_bytes: int, total_bytes: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_SECONDS:
            last = time.monotonic()
            channel.say(Loading(loaded_bytes))

    return progress


def follow(
    channel: Channel,
    runner: FollowerRunner,
    on_step: Callable[[int], object] = bool,
    faults: RankFaults | None = None,
    incarnation: str = "",
) -> None:
    """Execute steps until rank 0 has closed the connection (ChannelClosedError). ``on_step``: called with the
    number of each step that was executed.
    """
    decoder = StepDecoder(runner.limits, incarnation)
    timeout: float | None = None

    while True:
        try:
            body = channel.receive(step_codec.MAX_STEP_BYTES, timeout)
        except ChannelTimeoutError:
            raise RankLostError(
                f"Rank 0 did not take part in step {decoder.sequence}. The pod restarts; if it comes back, "
                "look at the node's CPU and memory, and report it with the log."
            ) from None
        message = decoder.decode(body)
        if faults is not None:
            faults.before_exchanges(decoder.sequence)
        status, copied = runner.execute(message)
        if faults is not None:
            faults.after_exchanges(decoder.sequence)
        reports = runner.adapter_reports()
        echo = Echo(decoder.sequence, decoder.digest, status, copied, runner.work, reports)
        channel.send(step_codec.encode_echo(echo))
        on_step(decoder.sequence)
        runner.prepare()
        if status is EchoStatus.LOST_PEER:
            timeout = _LEADER_SECONDS


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(sys.argv[1:]))
