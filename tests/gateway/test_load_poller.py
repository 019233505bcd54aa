"""How much a replica has to do, by what its /statusz says."""

import pytest

from quire_gateway.load_poller import STALE_SECONDS, total_load


def test_what_waits_and_what_runs_are_counted() -> None:
    assert total_load(b'{"sampleAge": 0.1, "queued": 2, "running": 3}') == 5


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'{"queued": 2, "running": 3}',
        b'{"sampleAge": 0.1, "queued": null, "running": 3}',
        b'{"sampleAge": 0.1, "queued": "many", "running": 3}',
        b'{"sampleAge": %d, "queued": 2, "running": 3}' % (STALE_SECONDS + 1),
    ],
)
def test_what_says_nothing_of_now_is_no_load(text: bytes) -> None:
    assert total_load(text) is None
