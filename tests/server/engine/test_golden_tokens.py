"""The golden tokens: which file has some, and what an engine makes of them."""

import json
import logging

import pytest

from quire_server.engine.golden_tokens import Golden, GoldenTokens
from quire_server.errors import CanaryMismatchError
from quire_server.health.heartbeat import Phase
from tests.server.engine.conftest import FINGERPRINT
from tests.server.engine.peer import Peer

RIGHT = [84 + i for i in range(10)]  # of the runner that counts on from the canary's last token
OTHERS = {"fingerprint": "0" * 64, "tokens": [1] * 10, "pod": "other"}


def entry(tokens, pod="m-0"):
    return {"fingerprint": FINGERPRINT, "tokens": tokens, "pod": pod}


def write(path, document):
    path.write_text(json.dumps(document))
    return path


def test_an_engine_whose_first_canary_has_other_tokens_than_the_golden_ones_does_not_start(
    start_engine, tmp_path
):
    path = write(tmp_path / "golden.json", [OTHERS, entry([*RIGHT[:-1], 7])])
    with pytest.raises(CanaryMismatchError, match="than pod m-0, whose tokens are kept"):
        start_engine(golden_path=path)


@pytest.mark.parametrize("entries", [[], [OTHERS], [OTHERS, entry(RIGHT), entry([1])]])
def test_an_engine_starts_with_its_own_golden_tokens_or_with_those_of_other_fingerprints(
    start_engine, tmp_path, entries
):
    engine = start_engine(golden_path=write(tmp_path / "golden.json", entries))
    with Peer(engine):
        engine.wait(lambda engine: engine.state.read_heartbeat().phase is Phase.SERVING)
    assert list(engine.core.canary_tokens) == RIGHT


def test_golden_tokens_that_appear_later_are_compared_with_the_next_canary(start_engine, tmp_path):
    """Two replicas that start at once each serve before the first one's tokens are kept."""
    path = tmp_path / "golden.json"
    engine = start_engine(golden_path=path, canary_interval=0.1, stall=0.4)
    with Peer(engine):
        engine.wait(lambda engine: engine.state.read_heartbeat().phase is Phase.SERVING)
        write(path, [entry([*RIGHT[:-1], 7], "first")])
        engine.thread.join(60)
    assert "than pod first, whose tokens are kept, 3 times in a row" in str(engine.error)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"{}",
        b"[" * 60_000,
        b"[" + b" " * (64 << 10) + b"]",
        b"9" * 5000,
        json.dumps([entry([])]).encode(),
        json.dumps([entry("84")]).encode(),
        json.dumps([entry([1.5, True])]).encode(),
        json.dumps([entry(list(range(100)))]).encode(),
    ],
    ids=["absent", "empty", "text", "bytes", "object", "deep", "long", "number"]
    + ["no tokens", "string", "floats", "many tokens"],
)
def test_a_file_without_use_hinders_nothing_and_is_said_once(tmp_path, caplog, content):
    path = tmp_path / "golden.json"
    if content is not None:
        path.write_bytes(content)
    golden = GoldenTokens(path, FINGERPRINT)
    with caplog.at_level(logging.INFO):
        assert [golden.find() for _ in range(3)] == [None] * 3
    assert [record.message for record in caplog.records] == [
        "no golden tokens: the canary is compared with its own first answer"
    ]
    write(path, [entry([1, 2])])
    assert golden.find() == Golden((1, 2), "m-0"), "it may be repaired while the server runs"


def test_without_a_path_nothing_is_said(caplog):
    assert GoldenTokens(None, FINGERPRINT).find() is None
    assert caplog.records == []
