"""The sequences that own a row of the runner, in their order: the first goes first, the last gives way.

Called by the scheduler, which decides who enters and who leaves. Knows nothing of blocks or budgets.
"""

from bisect import insort

from quire_server.core.sequence import Sequence


class Running:
    """``sequences`` is sorted by order; read it freely, change it here only."""

    def __init__(self, num_rows: int) -> None:
        self.sequences: list[Sequence] = []
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))  # the lowest is next

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free_rows)

    @property
    def is_full(self) -> bool:
        """Whether every row is taken."""
        return not self._free_rows

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a row and its place in the order."""
        sequence.row = self._free_rows.pop()
        insort(self.sequences, sequence, key=_order)

    def leave(self, sequence: Sequence) -> None:
        """Take its row back."""
        self.sequences.remove(sequence)
        self._free_rows.append(sequence.row)

    def check(self) -> None:
        """Raise AssertionError when a row is lost or taken twice, or the order is broken."""
        rows = sorted([*self._free_rows, *(sequence.row for sequence in self.sequences)])
        assert rows == list(range(self._num_rows)), "rows"
        orders = list(map(_order, self.sequences))
        assert orders == sorted(orders), "order"


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
