"""A source that promises no digests, as a bucket does: what is kept of it belongs to one state of it."""

import dataclasses
import threading

import pytest

from quire_server.fetch import directory
from quire_server.fetch.directory import Order
from quire_server.fetch.progress import Progress
from quire_server.fetch.remote import Listing, RemoteFile
from quire_server.fetch.transfer import Patience
from tests.server.fetch import published

SHARD, OTHER = published.SHARDS


class Shelf:
    """A `Remote`, in memory. Whoever publishes again gives every file another version."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.publish(files)
        self.turn = 0

    def publish(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.turn = getattr(self, "turn", 0) + 1

    def list_files(self, revision: str) -> Listing:
        found = [RemoteFile(name, len(data), None, str(self.turn), name) for name, data in self.files.items()]
        return Listing("", tuple(found))

    def read(self, file: RemoteFile, offset: int):
        yield self.files[file.name][offset:]

    def close(self) -> None:
        pass


@pytest.fixture
def order(tmp_path):
    return Order("s3://models/tiny", tmp_path / "model", 1, Patience(attempts=1))


def contents(place):
    return {name: (place / name).read_bytes() for name in published.WANTED}


def wanted(files):
    return {name: files[name] for name in published.WANTED}


def test_a_repair_mixes_no_files_of_two_states_of_the_source(order):
    shelf, newer = Shelf(published.files(seed=1)), published.files(seed=2)
    directory.fetch(shelf, order, Progress())
    (order.to / SHARD).write_bytes(b"rotten")
    shelf.publish(newer)

    directory.fetch(shelf, order, Progress())

    assert contents(order.to) == wanted(newer)


def test_a_repair_changes_no_file_under_a_server_that_reads_it(order):
    older = published.files(seed=1)
    shelf = Shelf(older)
    directory.fetch(shelf, order, Progress())
    (order.to / SHARD).write_bytes(b"rotten")
    shelf.publish(published.files(seed=2) | {OTHER: b"much shorter"})

    with (order.to / OTHER).open("rb") as served:
        directory.fetch(shelf, order, Progress())
        assert served.read() == older[OTHER]
    assert (order.to / OTHER).read_bytes() == b"much shorter"


def test_a_repair_of_the_same_state_reads_only_what_differs(order):
    shelf = Shelf(published.files())
    directory.fetch(shelf, order, Progress())
    (order.to / SHARD).write_bytes(b"rotten")
    read = []
    before = shelf.read
    shelf.read = lambda file, offset: read.append(file.name) or before(file, offset)

    directory.fetch(shelf, order, Progress())

    assert contents(order.to) == wanted(shelf.files)
    assert read == [SHARD]


def test_an_error_that_nobody_foresaw_ends_the_other_downloads_too(order):
    shelf, sent, never = Shelf(published.files()), [], threading.Event()

    def read(file, offset):
        if file.name == SHARD:
            raise RuntimeError("a mistake of ours")
        for begin in range(offset, file.size, 100):
            sent.append(file.name)
            never.wait(0.002)
            yield shelf.files[file.name][begin : begin + 100]

    shelf.read = read
    with pytest.raises(RuntimeError):
        directory.fetch(shelf, dataclasses.replace(order, parallel=2), Progress())

    assert sent.count(OTHER) < len(shelf.files[OTHER]) / 100


def test_another_models_download_beside_it_is_left_alone(order, tmp_path):
    theirs = tmp_path / ".model.1-8B.0123456789abcdef.part"
    theirs.mkdir()

    directory.fetch(Shelf(published.files()), order, Progress())

    assert theirs.exists()
