"""Output files: whole, and never replaced by less."""

import json

import pytest

from quire_batch.batch_files import LostBatchError, write_results
from quire_batch.contents import Contents
from quire_batch.records import Batch, LineState, Result, Status
from quire_batch.space import Space


class FakeStore:
    def __init__(self, number):
        self.number = number

    def results(self, batch_id, states):
        if LineState.DONE in states:
            for number in range(1, self.number + 1):
                yield Result(number, f"line-{number}", LineState.DONE, b'{"x":"%s"}' % (b"y" * (3 << 20)))


def ended(status, total, completed):
    values = {"id": "batch_1", "owner": "a", "endpoint": "/v1/completions", "delegation": ""}
    times = {"created_at": 1, "expires_at": 2}
    return Batch(**values, **times, status=status, total=total, completed=completed)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_worker_that_has_lost_the_batch_replaces_no_file_with_a_shorter_one(tmp_path, left):
    """The lines go while it writes: another worker has finalized the batch."""
    contents = Contents.in_directory(tmp_path)
    made = ended(Status.FINALIZING, 4, 4)
    written = write_results(made, FakeStore(4), contents, Space(None), 1.0)
    whole = b"".join(contents.read(written["output_file_id"].id))
    assert whole.count(b"\n") == 4
    with pytest.raises(LostBatchError):
        write_results(made, FakeStore(left), contents, Space(None), 2.0)
    assert b"".join(contents.read(written["output_file_id"].id)) == whole
    assert len(list(tmp_path.iterdir())) == 1, "and nothing is left of it"


class EndedStore:
    """Of a batch that has ended before its second and its third line were answered."""

    def results(self, batch_id, states):
        found = (LineState.DONE, LineState.RUNNING, LineState.WAITING)
        for number, state in enumerate(found, start=1):
            if state in states:
                yield Result(number, f"line-{number}", state, b"{}" if state is LineState.DONE else b"")


@pytest.mark.parametrize(
    ("status", "code"), [(Status.CANCELLING, "batch_cancelled"), (Status.FINALIZING, "batch_expired")]
)
def test_lines_that_the_end_of_a_batch_has_left_say_how_it_has_ended(tmp_path, status, code):
    contents = Contents.in_directory(tmp_path)
    written = write_results(ended(status, 3, 1), EndedStore(), contents, Space(None), 1.0)
    errors = b"".join(contents.read(written["error_file_id"].id)).splitlines()
    assert [json.loads(one)["error"]["code"] for one in errors] == [code, code]
    assert [json.loads(one)["custom_id"] for one in errors] == ["line-2", "line-3"]
