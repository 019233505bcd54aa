"""What is done next for a list of adapters, by what is there."""

from dataclasses import replace

from quire_server.fetch.adapter_list import AdapterList, Entry, Refusal
from quire_server.fetch.adapter_plan import (
    Download,
    Failure,
    Fetched,
    Observed,
    failed,
    make_plan,
    state_file,
)

A, B, C, D = (Entry(name, f"hf://org/{name}") for name in "abcd")
A2 = replace(A, source="hf://org/new")


def fetched(*entries, **changes):
    """What is there once these entries are fetched and published."""
    found = Observed(
        fetched={entry.name: Fetched(entry.key, f"rev-{entry.source}", 10) for entry in entries},
        published={entry.name: entry.key for entry in entries},
        items={entry.name: frozenset({entry.key, f".{entry.key}.lock"}) for entry in entries},
    )
    return replace(found, **changes)


def plan(entries, observed, now=0.0, refusals=()):
    return make_plan(AdapterList(tuple(entries), tuple(refusals)), observed, now)


def states(made):
    return {document["name"]: document["state"] for document in made.states.values()}


def test_two_are_fetched_at_a_time_in_the_order_of_the_list_and_all_have_a_state():
    made = plan([A, B, C], Observed())
    assert made.start == (A, B)
    assert states(made) == dict.fromkeys("abc", "Fetching")
    made = plan([A, B, C], Observed(running={"a": Download(A.key, 3, 9)}))
    assert made.start == (B,)
    assert (made.states["a.json"]["bytes"], made.states["a.json"]["total_bytes"]) == (3, 9)


def test_those_that_failed_least_come_first_and_a_failure_waits_for_its_turn():
    failures = {"a": Failure(A.key, "x", "y", 3, 50.0), "b": Failure(B.key, "x", "y", 1, 40.0)}
    observed = Observed(failures=failures)
    assert plan([A, B, C, D], observed, now=45.0).start == (C, D)
    assert plan([A, B], observed, now=45.0).start == (B,)
    assert plan([A, B, C], observed, now=50.0).start == (C, B)


def test_delays_double_up_to_five_minutes_and_begin_anew_with_another_entry():
    failure, delays = None, []
    for _ in range(8):
        failure = failed(failure, A.key, "DiskFull", "no room", 100.0)
        delays.append(failure.retry_at - 100.0)
    assert delays == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert failed(failure, A2.key, "DiskFull", "no room", 100.0).retry_at == 105.0


def test_what_is_fetched_is_published_and_then_nothing_is_left_to_do():
    there = fetched(A)
    made = plan([A], replace(there, published={}))
    assert (made.publish, made.start, states(made)) == ((A,), (), {"a": "Fetching"})
    made = plan([A], there)
    assert (made.publish, made.start, made.prune) == ((), (), ())
    assert made.states["a.json"] | {} == {
        "name": "a",
        "state": "Fetched",
        "bytes": 10,
        "total_bytes": 10,
        "reason": "",
        "message": "",
        "revision": "rev-hf://org/a",
    }


def test_a_changed_entry_is_fetched_anew_and_its_old_content_stays_until_then():
    made = plan([A2], fetched(A))
    assert (made.start, made.prune, made.remove) == ((A2,), (("a", f".{A.key}.lock"),), ())
    assert made.states["a.json"]["state"] == "Fetching"
    assert made.states["a.json"]["revision"] == "rev-hf://org/a"
    items = {"a": frozenset({A.key, f".{A.key}.lock", A2.key, f".{A2.key}.lock"})}
    new = {"a": Fetched(A2.key, "new", 1)}
    made = plan([A2], fetched(A, fetched=new, items=items))
    assert made.publish == (A2,) and ("a", A.key) not in made.prune
    made = plan([A2], fetched(A2, items=items))
    assert made.prune == (("a", f".{A.key}.lock"), ("a", A.key))


def test_a_download_of_an_entry_that_changed_or_left_is_stopped_before_its_files_are_touched():
    running = {"a": Download(A.key), "b": Download(B.key)}
    items = {"a": frozenset({f".{A.key}.0123456789abcdef.part"}), "b": frozenset()}
    made = plan([A2], Observed(running=running, items=items))
    assert (made.stop, made.start, made.prune, made.remove) == (("a", "b"), (), (), ())
    made = plan([A2], Observed(items=items))
    assert (made.start, made.prune) == ((A2,), (("a", f".{A.key}.0123456789abcdef.part"),))
    assert made.remove == ("b",)


def test_what_left_the_list_is_removed_with_its_state_and_a_refused_entry_keeps_its_content():
    there = fetched(A, B, stated=frozenset({"a.json", "b.json", ".a.json.new"}))
    made = plan([], there, refusals=[Refusal("b", "source is wrong"), Refusal("../x", "name is wrong")])
    assert made.remove == ("a",)
    assert made.unsaid == (".a.json.new", "a.json")
    assert (
        made.states["b.json"]["state"] == "Failed" and made.states["b.json"]["message"] == "source is wrong"
    )
    assert states(made)["../x"] == "Failed"
    assert not any("/" in file for file in made.states)


def test_a_reason_stays_until_another_try_has_any_bytes():
    observed = Observed(failures={"a": Failure(A.key, "ModelNotFound", "It is not there.", 1, 5.0)})
    for running, state in (({}, "Failed"), (Download(A.key), "Failed"), (Download(A.key, 1, 2), "Fetching")):
        made = plan([A], replace(observed, running={"a": running} if running else {}))
        assert made.states["a.json"]["state"] == state
    assert plan([A2], observed).states["a.json"]["message"] == ""


def test_half_an_adapter_that_has_no_room_makes_room_and_any_other_half_is_resumed():
    part = f".{A.key}.0123456789abcdef.part"
    observed = Observed(items={"a": frozenset({part, f".{A.key}.lock"})})
    for reason, pruned in (("ModelDownloadFailed", ()), ("OutOfDisk", (("a", part),))):
        failures = {"a": Failure(A.key, reason, "", 1, 5.0)}
        assert plan([A], replace(observed, failures=failures)).prune == pruned
        assert plan([A], replace(observed, failures=failures, running={"a": Download(A.key)})).prune == ()


def test_content_that_was_deleted_by_hand_is_fetched_again():
    made = plan([A], fetched(A, items={"a": frozenset()}))
    assert made.start == (A,) and states(made) == {"a": "Fetching"}


def test_the_longest_name_has_a_file_for_its_state():
    names = ["x" * 253, "x" * 252 + "y", "a", "..", "a/b"]
    files = [state_file(name) for name in names]
    assert len(set(files)) == len(names)
    assert all(len(file) < 250 and "/" not in file for file in files)
