"""What a list of adapters may say, and the sentence for what it may not."""

import json
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.errors import ConfigError
from quire_server.fetch.adapter_list import AdapterList, Entry, parse
from quire_server.model_dir.adapter_layout import is_adapter_name

CLAIMS = PurePosixPath("/adapter-claims")
GOOD = {"name": "support", "source": "hf://org/x@v1"}


def parsed(*entries):
    return parse(json.dumps({"adapters": entries}).encode(), CLAIMS)


def test_an_entry_has_a_source_or_a_path_and_the_environment_of_its_download():
    hub = {**GOOD, "environment": {"HF_ENDPOINT": "https://hub"}, "files": {"HF_TOKEN": "/t"}}
    claim = {"name": "other", "path": "/adapter-claims/c/sub dir", "anonymous": True}
    assert parsed(hub, claim) == AdapterList((
        Entry("support", "hf://org/x@v1", False, {"HF_ENDPOINT": "https://hub"}, {"HF_TOKEN": "/t"}),
        Entry("other", "file:///adapter-claims/c/sub%20dir", True),
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "../x"}, "name must have letters"),
        ({"name": ".state"}, "name must have letters"),
        ({"name": "a/b"}, "name must have letters"),
        ({"name": "x" * 254}, "up to 253"),
        ({"name": None}, "name must have letters"),
        ({"source": "hf://user:canary@org"}, "names no model"),
        ({"source": "file:///etc"}, "write path in place of it"),
        ({"source": None}, "Write source"),
        ({"path": "/adapter-claims/c"}, "and not both"),
        ({"source": None, "path": "/etc"}, "below /adapter-claims"),
        ({"source": None, "path": "/adapter-claims"}, "below /adapter-claims"),
        ({"source": None, "path": "/adapter-claims/../etc"}, "without '..'"),
        ({"source": None, "path": "/adapter-claims/a\0"}, "below /adapter-claims"),
        ({"anonymous": "yes"}, "anonymous must be true or false"),
        ({"environment": {"LD_PRELOAD": "/x"}}, "environment.LD_PRELOAD is no variable of a download"),
        ({"environment": {"HF_TOKEN": "canary"}}, "name a file that holds it, in files"),
        ({"environment": {"HF_ENDPOINT": "canary\n"}}, "a text of one line"),
        ({"environment": ["HF_ENDPOINT"]}, "environment must be an object"),
        ({"files": {"PATH": "/x"}}, "files.PATH is no variable"),
        ({"files": {"HF_TOKEN": "token"}}, "must be the absolute path"),
        ({"priority": 1}, "'priority' is not known"),
    ],
)
def test_a_bad_entry_is_refused_with_a_sentence_and_hurts_no_other(change, reason):
    bad = {key: value for key, value in {**GOOD, "name": "bad", **change}.items() if value is not None}
    found = parsed(bad, GOOD)
    assert [entry.name for entry in found.entries] == ["support"]
    (refusal,) = found.refusals
    assert reason in refusal.message and "canary" not in refusal.message
    assert refusal.name == ("bad" if "name" not in change else "adapters[0]")


def test_an_entry_may_set_what_was_allowed_beside_the_known_variables():
    data = json.dumps({"adapters": [{**GOOD, "environment": {"COMPANY_CA": "x"}}]}).encode()
    assert parse(data, CLAIMS).entries == ()
    assert parse(data, CLAIMS, ["COMPANY_CA"]).entries[0].environment == {"COMPANY_CA": "x"}


def test_of_two_entries_with_one_name_the_first_counts():
    found = parsed(GOOD, {**GOOD, "source": "hf://org/y"}, "x")
    assert [entry.source for entry in found.entries] == ["hf://org/x@v1"]
    assert [refusal.name for refusal in found.refusals] == ["adapters[1]", "adapters[2]"]
    assert "so is an earlier one's" in found.refusals[0].message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"adapters": [', "is not JSON. Write the list again."),
        (b"[]", "holds no JSON object"),
        (b"{}", "must be an object with 'adapters'"),
        (b'{"adapters": {}}', "must be an object with 'adapters'"),
        (json.dumps({"adapters": [GOOD] * 257}).encode(), "a list of up to 256"),
        (b" " * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
)
def test_a_list_of_which_no_entry_can_be_made_out_is_refused_whole(data, reason):
    with pytest.raises(ConfigError, match=reason.replace("[", r"\[")) as refused:
        parse(data, CLAIMS)
    assert "Download or import" not in str(refused.value)


def test_another_key_means_that_anything_of_an_entry_has_changed():
    one = Entry("a", "hf://org/x")
    others = [
        Entry("a", "hf://org/y"),
        Entry("a", "hf://org/x", True),
        Entry("a", "hf://org/x", files={"A": "/b"}),
    ]
    assert one.key == Entry("a", "hf://org/x").key
    assert len({one.key, *(other.key for other in others)}) == 4


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FIELDS = st.sampled_from(("name", "source", "path", "anonymous", "environment", "files"))


@settings(max_examples=50)
@given(st.lists(st.dictionaries(FIELDS, ANY, max_size=4) | ANY, max_size=4))
def test_whatever_json_says_each_entry_is_taken_or_refused(entries):
    found = parsed(*entries)
    assert len(found.entries) + len(found.refusals) == len(entries)
    assert all(is_adapter_name(entry.name) for entry in found.entries)
