"""Where every sequence stands, and its moves: it arrives, takes a row, gives it back for a while, ends.

Called by the scheduler, which decides who moves. Here each move does all that belongs to it, so that rows,
queue, blocks and statuses always agree. Knows no budget and no step.
"""

from quire_server.core.arrivals import Arrivals
from quire_server.core.handover import started_row
from quire_server.core.kv_manager import KVManager, Match
from quire_server.core.limits import SchedulerConfig
from quire_server.core.running import Running
from quire_server.core.sequence import Sequence, Status
from quire_server.core.step import StartedRow
from quire_server.core.waiting import WaitingQueue


class Lifecycle:
    """``sequences`` are all that live, by request id; ``waiting`` and ``running`` are for reading only."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, arrivals: Arrivals) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running = Running(config.max_num_seqs)
        self.is_blocked = False  # the first waiting sequence did not fit, and nothing came free since
        self.preemptions = 0
        self._kv = kv
        self._arrivals = arrivals
        self._block_size = config.block_size

    def arrive(self, sequence: Sequence) -> None:
        """A new one waits."""
        self.sequences[sequence.request.request_id] = sequence
        self.is_blocked = False
        self.waiting.push(sequence)

    def start(self, sequence: Sequence, match: Match) -> StartedRow:
        """The first of the waiting ones takes a row and its blocks."""
        self.waiting.pop()
        sequence.become(Status.RUNNING)
        self.running.enter(sequence)
        self._kv.start(sequence, match)
        sequence.watch(self._block_size)
        return started_row(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Its blocks go to others; it waits for its next turn."""
        self.preemptions += 1
        self._kv.preempt(sequence)
        self._arrivals.interrupted(sequence)
        self._wait_again(sequence)

    def restart(self, sequence: Sequence) -> None:
        """A block of its prefix did not come from a lower tier as it was: what it computed is void."""
        self._kv.spoilt(sequence)
        self._wait_again(sequence)

    def finish(self, sequence: Sequence) -> None:
        """It gives everything back, wherever it stands."""
        was_waiting = sequence.status is Status.WAITING
        self._kv.finish(sequence)
        if not was_waiting:
            self._leave_row(sequence)
        sequence.become(Status.FINISHED)
        if was_waiting:
            self.waiting.gone()
        self.is_blocked = False  # whoever waited behind it may fit
        del self.sequences[sequence.request.request_id]

    def _wait_again(self, sequence: Sequence) -> None:
        self._leave_row(sequence)
        sequence.become(Status.WAITING)
        self.waiting.push(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.leave(sequence)
        self.is_blocked = False
