"""What pods report about themselves is bounded, typed and sanitized, or dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator import reports
from quire_operator.reports import (
    Canary,
    RankReport,
    Sample,
    Termination,
    parse_golden_tokens,
    parse_statusz,
    parse_termination,
    printable,
)


def statusz(**fields: Any) -> bytes:
    return json.dumps({"phase": "loading", **fields}).encode()


def test_a_valid_response_is_parsed() -> None:
    raw = statusz(
        reason="CanaryMismatch",
        loadedBytes=5,
        totalBytes=10,
        etaSeconds=1.9,
        loadSeconds=None,
        version="0.1.0",
        queued=3,
    )

    assert parse_statusz(raw) == Sample(
        phase="loading",
        reason="CanaryMismatch",
        loaded_bytes=5,
        total_bytes=10,
        eta_seconds=1,
        version="0.1.0",
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"loading"',
        b"{" * 5000,
        b"[" * 16000,
        b'{"phase": "on fire"}',
        b'{"phase": ["loading"]}',
        b'{"phase": {"a": 1}}',
        b'{"loadedBytes": 1}',
        statusz(pad="x" * reports.MAX_STATUSZ_BYTES),
    ],
)
def test_an_invalid_response_is_dropped_entirely(raw: bytes) -> None:
    assert parse_statusz(raw) is None


@pytest.mark.parametrize("value", [-1, 10**30, 1e308, "5", True, [], {}, None])
def test_an_invalid_number_is_ignored(value: Any) -> None:
    sample = parse_statusz(statusz(loadedBytes=value, totalBytes=value, etaSeconds=value, loadSeconds=value))

    assert sample == Sample(phase="loading")


def test_nan_and_infinity_are_ignored() -> None:
    raw = b'{"phase": "loading", "etaSeconds": NaN, "loadSeconds": Infinity, "totalBytes": -Infinity}'

    assert parse_statusz(raw) == Sample(phase="loading")


def test_loaded_bytes_are_capped_at_total_bytes() -> None:
    sample = parse_statusz(statusz(loadedBytes=50, totalBytes=10))

    assert sample is not None and sample.loaded_bytes == 10


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (["api", "rank 2", "rank 13"], ("api", "rank 2", "rank 13")),
        (["rank 2\n", "rank", "Rank 2", "rank 99999", "pod x", 2, None, "engine"], ("engine",)),
        (["rank 1"] * 1000, ("rank 1",) * 40),
        ("rank 1", ()),
        (None, ()),
    ],
)
def test_only_names_of_processes_are_read(said: Any, kept: tuple[str, ...]) -> None:
    sample = parse_statusz(statusz(silent=said))

    assert sample is not None and sample.silent == kept


def test_the_ranks_of_a_model_are_read_all_or_none() -> None:
    other = {"rank": 1, "lastStep": 6, "host": "m-0-1", "stepSeconds": 0.25}
    said = [{"rank": 0, "beatAge": 0.1, "lastStep": 7, "missing": ""}, other]
    sample = parse_statusz(statusz(ranks=said))

    assert sample is not None
    assert sample.ranks == (
        RankReport(rank=0, last_step=7),
        RankReport(rank=1, last_step=6, host="m-0-1", step_micros=250_000),
    )
    for host, seconds in (("<b>", -1), ("x" * 254, "1"), (["m"], float("inf")), (None, None)):
        kept = parse_statusz(statusz(ranks=[{**other, "host": host, "stepSeconds": seconds}]))
        assert kept is not None and kept.ranks == (RankReport(rank=1, last_step=6),)
    worker = parse_statusz(statusz(ranks=[{"rank": 3, "lastStep": 6}]))
    assert worker is not None and worker.ranks == (RankReport(rank=3, last_step=6),)
    for broken in (
        [{"lastStep": 6}],
        [{"rank": 10**9, "lastStep": 6}],
        said[::-1],
        [*said, 3],
        [said[0], {"rank": 1, "lastStep": -1}],
        said * 99,
        "x",
        None,
    ):
        sample = parse_statusz(statusz(ranks=broken))
        assert sample is not None and sample.ranks == ()


@pytest.mark.parametrize("reason", ["a b", "canary", "X" * 100, "A\n", "A;B", 5, None])
def test_an_invalid_reason_becomes_empty(reason: Any) -> None:
    sample = parse_statusz(statusz(reason=reason))

    assert sample is not None and sample.reason == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"reason": "ModelCorrupt", "message": "bad"}', Termination(reason="ModelCorrupt", message="bad")),
        ('{"reason": 5, "message": ["x"]}', Termination()),
        ("Traceback\n  File\nRuntimeError: boom\n", Termination(message="RuntimeError: boom")),
        ("", Termination()),
        (None, Termination()),
        (5, Termination()),
        ("{" * 5000, Termination(message=f"{'{' * 509}...")),
    ],
)
def test_a_termination_message_is_parsed_as_our_json_or_as_its_last_line(
    text: object, expected: Termination
) -> None:
    assert parse_termination(text) == expected


def logged(level: str, message: str, **fields: Any) -> str:
    return json.dumps({"time": "2026-11-23T20:00:00.000Z", "level": level, "message": message, **fields})


KILLED = "the engine process was ended by SIGKILL: most likely the container is out of memory"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([logged("error", KILLED), logged("info", "ended", exit_code=137)], KILLED),
        ([logged("error", "an earlier one"), logged("critical", KILLED), logged("warning", "x")], KILLED),
        ([logged("info", "serving", model="/models")], ""),
        ([logged("info", "loading"), logged("info", "serving", model="/models")], ""),
        (['process": "API", "message": "cut"}', logged("info", "serving")], ""),
        ([logged("info", "serving"), "Traceback", "RuntimeError: boom"], "RuntimeError: boom"),
    ],
)
def test_of_a_log_the_last_error_is_quoted_and_never_a_line_as_json(lines: list[str], expected: str) -> None:
    assert parse_termination("\n".join(lines) + "\n") == Termination(message=expected)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_bytes_never_raise(raw: bytes) -> None:
    parse_statusz(raw)
    parse_termination(raw.decode("utf-8", "replace"))


@given(st.text(max_size=2000))
def test_printable_text_is_one_bounded_line_without_control_characters(text: str) -> None:
    line = printable(text)

    assert len(line) <= reports.MAX_MESSAGE_CHARS
    assert line.isprintable() or all(c.isprintable() or c in "\u00a0\u00ad" or ord(c) > 255 for c in line)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E for c in line)


CANARY = {"fingerprint": "a" * 64, "tokens": [1, 2, 3]}


def test_a_canary_is_parsed() -> None:
    sample = parse_statusz(statusz(canary=CANARY))
    assert sample is not None
    assert sample.canary == Canary(fingerprint="a" * 64, tokens=(1, 2, 3))


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {**CANARY, "fingerprint": "A" * 64},
        {**CANARY, "fingerprint": "a" * 63},
        {**CANARY, "fingerprint": 5},
        {**CANARY, "tokens": []},
        {**CANARY, "tokens": [1] * 65},
        {**CANARY, "tokens": [1.0]},
        {**CANARY, "tokens": [True]},
        {**CANARY, "tokens": [-1]},
        {**CANARY, "tokens": [1 << 31]},
        {**CANARY, "tokens": "123"},
    ],
)
def test_a_canary_that_could_not_be_is_dropped_and_the_rest_is_kept(said: object) -> None:
    sample = parse_statusz(statusz(canary=said))
    assert sample is not None
    assert sample.canary is None
    assert parse_golden_tokens(json.dumps([{"pod": "m-0", **said}] if isinstance(said, dict) else said)) == ()


@pytest.mark.parametrize(
    "text", [None, 5, "", "x", "{}", "[" * 5000, "[1, null]", "[" + " " * (64 << 10) + "]", "9" * 5000]
)
def test_golden_tokens_that_a_user_broke_are_none(text: object) -> None:
    assert parse_golden_tokens(text) == ()


def test_of_golden_tokens_the_valid_ones_and_the_first_of_each_fingerprint_are_read() -> None:
    entries = [
        {**CANARY, "pod": "UPPER case\n"},
        {**CANARY, "pod": "m-0"},
        {**CANARY, "tokens": [9], "pod": "m-1"},
        {"fingerprint": "b" * 64, "tokens": [4], "pod": "m-1"},
    ]
    assert [(one.canary.tokens, one.pod) for one in parse_golden_tokens(json.dumps(entries))] == [
        ((1, 2, 3), "m-0"),
        ((4,), "m-1"),
    ]


def test_adapters_are_read_as_a_server_lists_them() -> None:
    said = {
        "name": "a.1",
        "state": "Fetching",
        "reason": "",
        "bytes": 1,
        "total_bytes": 2,
        "revision": "9216db57",
    }
    sample = parse_statusz(statusz(adapters=[said]))

    assert sample is not None
    assert sample.adapters == (
        reports.AdapterReport(
            name="a.1", state="Fetching", loaded_bytes=1, total_bytes=2, revision="9216db57"
        ),
    )


def test_of_hostile_adapters_only_what_can_be_shown_is_read() -> None:
    hostile = [
        {"name": "../x", "state": "Ready"},
        {"name": "x" * 254, "state": "Ready"},
        {"name": "a", "state": "Serving"},
        {"name": "a", "state": ["Ready"]},
        {"name": ["a"], "state": "Ready"},
        "a",
        {
            "name": "a",
            "state": "Failed",
            "reason": "\x1b[31mred" + "x" * 9999,
            "revision": "$(id)",
            "bytes": 9,
        },
        {"name": "a", "state": "Ready"},
    ]
    sample = parse_statusz(statusz(adapters=hostile))

    assert sample is not None
    (found,) = sample.adapters
    assert (found.name, found.state, found.revision, found.loaded_bytes) == ("a", "Failed", "", 0)
    assert "\x1b" not in found.message and len(found.message) <= reports.MAX_MESSAGE_CHARS
    for invalid in (None, {}, "a", 1):
        assert parse_statusz(statusz(adapters=invalid)) == Sample(phase="loading")


def test_a_server_s_longest_list_of_adapters_fits_an_answer() -> None:
    longest = {
        "state": "Failed",
        "reason": "x" * 512,
        "bytes": 1 << 50,
        "total_bytes": 1 << 50,
        "revision": "f" * 80,
    }
    listed = [{"name": f"{index:0253}", **longest} for index in range(64)]
    sample = parse_statusz(statusz(adapters=listed))
    assert sample is not None and len(sample.adapters) == 64
