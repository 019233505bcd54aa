"""A source without digests, such as a bucket: kept files belong to one version of it."""

import dataclasses
import threading

import pytest

from quire_server.fetch import directory
from quire_server.fetch.directory import FetchRequest
from quire_server.fetch.progress import Progress
from quire_server.fetch.source import Listing, RemoteFile
from quire_server.fetch.transfer import RetryPolicy
from tests.server.fetch import published

SHARD, OTHER = published.SHARDS


class Shelf:
    """A ``SourceClient`` in memory. Every publication gives every file another version."""

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
def fetch_request(tmp_path):
    return FetchRequest("s3://models/tiny", tmp_path / "model", 1, RetryPolicy(attempts=1))


def contents(place):
    return {name: (place / name).read_bytes() for name in published.WANTED}


def wanted(files):
    return {name: files[name] for name in published.WANTED}


def test_a_repair_does_not_mix_files_of_two_versions(fetch_request):
    shelf, newer = Shelf(published.files(seed=1)), published.files(seed=2)
    directory.fetch(shelf, fetch_request, Progress())
    (fetch_request.to / SHARD).write_bytes(b"rotten")
    shelf.publish(newer)

    directory.fetch(shelf, fetch_request, Progress())

    assert contents(fetch_request.to) == wanted(newer)


def test_a_repair_does_not_change_a_file_that_a_server_has_open(fetch_request):
    older = published.files(seed=1)
    shelf = Shelf(older)
    directory.fetch(shelf, fetch_request, Progress())
    (fetch_request.to / SHARD).write_bytes(b"rotten")
    shelf.publish(published.files(seed=2) | {OTHER: b"much shorter"})

    with (fetch_request.to / OTHER).open("rb") as served:
        directory.fetch(shelf, fetch_request, Progress())
        assert served.read() == older[OTHER]
    assert (fetch_request.to / OTHER).read_bytes() == b"much shorter"


def test_a_repair_of_the_same_version_reads_only_damaged_files(fetch_request):
    shelf = Shelf(published.files())
    directory.fetch(shelf, fetch_request, Progress())
    (fetch_request.to / SHARD).write_bytes(b"rotten")
    read = []
    before = shelf.read
    shelf.read = lambda file, offset: read.append(file.name) or before(file, offset)

    directory.fetch(shelf, fetch_request, Progress())

    assert contents(fetch_request.to) == wanted(shelf.files)
    assert read == [SHARD]


def test_an_unexpected_error_ends_the_other_downloads_too(fetch_request):
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
        directory.fetch(shelf, dataclasses.replace(fetch_request, parallel=2), Progress())

    assert sent.count(OTHER) < len(shelf.files[OTHER]) / 100


def test_another_models_partial_download_is_not_removed(fetch_request, tmp_path):
    theirs = tmp_path / ".model.1-8B.0123456789abcdef.part"
    theirs.mkdir()

    directory.fetch(Shelf(published.files()), fetch_request, Progress())

    assert theirs.exists()
