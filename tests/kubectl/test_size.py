"""`kubectl quire size`: figures, verdict, exit code, and errors that name what to give."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import models
from quire_kubectl.__main__ import main
from quire_sizing.accelerators import SHEETS
from tests.operator.status.test_accelerator_fit import LLAMA_2_13B, asked, computed, message
from tests.sizing.test_sizing import LLAMA_8B, MINILM


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def test_a_model_that_fits_is_reported_with_the_numbers_and_exit_code_0(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--memory", "80GB", "--bandwidth", "3.35TB/s", "--max-model-len", "8192"]
    code = main(["size", llama, *asked, "--max-num-seqs", "32"])

    out = capsys.readouterr().out
    assert code == 0
    assert "8.03 billion parameters" in out and "131,072 B" in out
    assert "Fits: all 32 requests, each with 8,192 tokens." in out
    assert "at most 209 tokens a second" in out
    assert "Note:" not in out


def test_a_model_that_embeds_texts_is_reported_without_a_kv_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINILM))
    assert main(["size", str(tmp_path), "--task", "Embed", "--memory", "24GB", "--bandwidth", "1TB/s"]) == 0
    out = capsys.readouterr().out
    assert "Fits: all 256 requests, each with 512 tokens." in out
    assert "KV" not in out and "One stream" not in out and "Note" not in out


def test_adapters_take_memory_of_the_accelerator_and_of_the_host(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    card = ["size", llama, "--memory", "24GB", "--max-model-len", "8192", "--max-num-seqs", "4"]
    adapters = ["--max-adapters", "8", "--max-adapter-rank", "64"]
    assert main([*card, *adapters, "--host-memory", "64Gi"]) == 0
    out = capsys.readouterr().out
    assert "adapters               2.7 GB  8 places for rank 64" in out
    assert "adapters on host        51     at most, of rank 64 for every matrix" in out
    assert "Fits: 1 requests of 8,192" in out and "Note" not in out
    assert main([*card, *adapters, "--host-memory", "24500MB"]) == 0
    assert "Note" not in capsys.readouterr().out
    assert main([*card, *adapters, "--host-memory", "10GB"]) == 0
    assert "The host has room for 7 adapters of rank 64" in capsys.readouterr().out
    assert main([*card, "--together", *adapters]) == 0
    together = capsys.readouterr().out
    assert "ADAPTERS" in together and "2.7 GB" in together
    assert main([*card]) == 0 and "adapters" not in capsys.readouterr().out


def test_memory_that_stages_blocks_is_shown_in_tokens_and_is_no_room_for_weights(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", llama, "--memory", "80GB", "--max-model-len", "8192", "--staging-memory", "4Gi"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "4.3 GB  of the host; 32,768 tokens on their way at a time" in out and "Note:" not in out
    assert main([*asked, "--host-memory", "82GB"]) == 0
    assert "Note: The memory of the container, without what stages KV blocks" in capsys.readouterr().out


def test_a_model_that_does_not_fit_exits_with_3_and_names_settings_that_fit(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", llama, "--memory", "24GB"]) == 3
    longest = capsys.readouterr().out.split("Lower maxModelLen to ")[1].split(".")[0].replace(",", "")
    assert main(["size", llama, "--memory", "24GB", "--max-model-len", longest]) == 0
    assert main(["size", llama, "--memory", "16GB"]) == 3
    assert "lacking before the first token" in capsys.readouterr().out
    assert main(["size", llama, "--memory", "16GB", "--weight-bits", "4", "--max-model-len", "8192"]) == 0


def test_json_output_has_the_verdict_the_numbers_and_the_advice(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["size", llama, "--memory", "80GB", "-o", "json"])

    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["kv_per_token"]) == ("FitsFewer", 131072)
    assert any("maxModelLen is not set" in line for line in document["advice"])


def test_a_model_larger_than_one_accelerator_is_sized_for_several(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", llama, "--memory", "16GB", "--max-model-len", "8192", "--max-num-seqs", "8"]
    assert main(asked) == 3
    capsys.readouterr()

    assert main([*asked, "--tensor", "4"]) == 0

    out = capsys.readouterr().out
    assert "16 bits each; of each of 4 accelerators:" in out
    assert "32,768 B" in out, "two of the eight heads of keys and values"
    assert "Fits: all 8 requests, each with 8,192 tokens." in out
    assert re.search(r"weights +4\.0 GB", out)


def test_stages_are_sized_each_with_the_share_of_time_in_which_they_are_busy(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", llama, "--memory", "10GB", "--max-model-len", "8192", "--max-num-seqs", "2"]
    assert main([*asked, "--pipeline", "3"]) == 0

    out = capsys.readouterr().out
    assert "of each of 3 accelerators, in the stage with room for the fewest tokens:" in out
    rows = re.findall(r"^  ([0-2]) +(\d+) +([\d.]+) GB", out, re.MULTILINE)
    assert [(stage, layers) for stage, layers, _ in rows] == [("0", "11"), ("1", "12"), ("2", "9")]
    assert "32% of the time with one request, 96% with 3 or more" in out
    assert "With 2 requests at once some of 3 stages are always idle" in out

    assert main([*asked, "--pipeline", "3", "--tensor", "2", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [stage["layers"] for stage in document["stages"]] == [11, 12, 9]
    assert document["stages"][1]["weights"] == pytest.approx(12 / 32 * 13.96e9 / 2, rel=1e-2)
    assert main([*asked, "--pipeline", "33"]) == 1
    assert "cannot be divided among 33 stages; give 1 to 32" in capsys.readouterr().err


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused_with_those_that_do(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", llama, "--memory", "80GB", "--tensor", "3"]) == 1
    assert "cannot be divided among 3 ranks; give one of 1, 2, 4, 8, 16, 32." in capsys.readouterr().err


def test_accelerators_of_several_nodes_are_counted_and_stages_between_nodes_advised(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", llama, "--memory", "80GB", "--max-model-len", "8192", "--max-num-seqs", "8"]
    assert main([*asked, "--tensor", "8", "--pipeline", "2", "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "of each of 16 accelerators, 8 on each of 2 nodes, in the stage with room" in out
    assert "Note:" not in out
    assert main([*asked, "--tensor", "16", "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "of each of 16 accelerators, 8 on each of 2 nodes:" in out
    assert "Note: Ranks that share layers are on several nodes" in out
    assert main([*asked, "--tensor", "4", "--nodes", "3"]) == 1
    assert "4 accelerators cannot be spread over 3 nodes" in capsys.readouterr().err


def test_ranks_over_pcie_are_advised_against(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles(tmp_path, monkeypatch)
    for name, is_named in (("l4", True), ("h100", False)):
        main(["size", llama, "--profile", name, "--tensor", "2", "--max-model-len", "4096"])
        assert ("PCIe alone" in capsys.readouterr().out) is is_named


def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *found: dict[str, object]) -> None:
    """A kubectl whose cluster has these AcceleratorProfiles."""
    known = {str(body["name"]): {"metadata": body, "spec": body["spec"]} for body in found}
    fake = tmp_path / "kubectl"
    fake.write_text(
        f"#!{sys.executable}\nimport json, sys\nknown = {known!r}\n"
        "name = sys.argv[3]\n"
        "if not known or not (name in known or name.startswith('--')):\n"
        "    sys.exit('The connection to the server was refused')\n"
        "print(json.dumps(known[name] if name in known else {'items': list(known.values())}))\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_profile_gives_the_same_numbers_as_the_fits_accelerator_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles(tmp_path, monkeypatch, {"name": "h100", "spec": {"memory": "80G", "memoryBandwidth": "3350G"}})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_13B))
    reported = message(computed(asked(maxModelLen=4096)))

    assert main(["size", str(tmp_path), "--profile", "h100", "--max-model-len", "4096"]) == 0

    shown = capsys.readouterr().out
    for in_status, shown_here in (
        ("weights 26.0 GB", "26.0 GB"),
        ("of 72.0 GB", "72.0 GB  90% of 80.0 GB"),
        ("13 requests of 4,096 tokens fit at once", "Fits: 13 requests of 4,096 tokens at once"),
    ):
        assert in_status in reported and shown_here in shown
    assert "at most 129 tokens a second" in shown
    assert "Note: h100 as the cluster's AcceleratorProfile has it." in shown


def table(text: str) -> dict[str, list[str]]:
    """The cells of each line by its first one."""
    found = (re.split(r" {2,}", line) for line in text.split("\n\n")[1].splitlines())
    return {first: cells for first, *cells in found}


def test_profiles_are_compared_and_the_cheapest_that_fits_comes_first(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles(
        tmp_path,
        monkeypatch,
        {"name": "small", "spec": {"memory": "16G", "costPerHour": "0.35"}},
        {"name": "dear", "spec": {"memory": "80G", "memoryBandwidth": "3350G", "costPerHour": "2.49"}},
        {"name": "cheap", "spec": {"memory": "24G", "memoryBandwidth": "300G", "costPerHour": "0.71"}},
        {"name": "free", "spec": {"memory": "48G"}},
    )

    assert main(["size", llama, "--max-model-len", "8192", "--max-num-seqs", "32"]) == 0
    out = capsys.readouterr().out

    rows = table(out)
    assert list(rows) == ["PROFILE", "cheap", "dear", "free", "small"]
    assert rows["dear"] == ["80.0 GB", "32 of 32", "131,072", "209", "2.49"]
    assert rows["free"][-2:] == ["-", "-"], "no bandwidth, no price"
    assert rows["small"][1:3] == ["0 of 32", "-"]
    assert "Note: Profiles as the cluster has them." in out

    main(["size", llama, "--profile", "dear", "--profile", "small", "-o", "json"])
    document = json.loads(capsys.readouterr().out)
    assert [(one["profile"], one["verdict"], one["cost_per_hour"]) for one in document["profiles"]] == [
        ("dear", "FitsFewer", "2.49"),
        ("small", "DoesNotFit", "0.35"),
    ]
    assert main(["size", llama, "--profile", "small"]) == 3
    main(["size", llama, "--profile", "dear"])
    assert "An hour costs 2.49." in capsys.readouterr().out


def test_without_a_cluster_the_shipped_profiles_are_compared(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles(tmp_path, monkeypatch)

    assert main(["size", llama, "--max-model-len", "8192"]) == 0

    out = capsys.readouterr().out
    assert table(out).keys() == {"PROFILE", *SHEETS}
    assert "as they are shipped" in out and "was refused" in out


def test_without_a_cluster_the_shipped_profile_is_used_with_a_note(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles(tmp_path, monkeypatch)
    answers = []
    for asked_for in (["--profile", "h100"], ["--profile", "h100-80gb"], ["--memory", "80GB"]):
        main(["size", llama, *asked_for, "-o", "json"])
        answers.append(json.loads(capsys.readouterr().out))

    by_prefix, by_name, by_hand = answers
    assert by_prefix == by_name
    assert "h100-80gb as it is shipped" in by_name["advice"][0] and "was refused" in by_name["advice"][0]
    assert {**by_name, "advice": by_name["advice"][1:]} == by_hand

    assert main(["size", llama, "--profile", "a100"]) == 1
    assert "give one of a100-40gb, a100-80gb" in capsys.readouterr().err
    assert main(["size", llama, "--profile", "abacus"]) == 1
    assert "h200-141gb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["/nowhere", "--memory", "80GB"], 1, "/nowhere cannot be read as a config.json"),
        ([str(models.smollm2()), "--memory", "80GB", "--max-model-len", "0"], 1, "maxModelLen is 0"),
        ([str(models.smollm2()), "--memory", "lots"], 2, "write one such as 80GB"),
        ([str(models.smollm2()), "--memory", "80GB", "--gpus", "2"], 2, "--gpus"),
        ([str(models.smollm2()), "--memory", "80GB", "--profile", "h100"], 2, "not allowed with"),
    ],
)
def test_invalid_arguments_are_reported_on_stderr_without_traceback(
    arguments: list[str], code: int, words: str
) -> None:
    command = [sys.executable, "-m", "quire_kubectl", "size", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert ended.returncode == code
    assert words in ended.stderr and "Traceback" not in ended.stderr and not ended.stdout


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Two folders: Llama 3.1 8B, and one with half of its layers."""
    for name, config in (("llama", LLAMA_8B), ("half", {**LLAMA_8B, "num_hidden_layers": 16})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return [str(tmp_path / "llama"), str(tmp_path / "half")]


def test_models_that_fit_one_accelerator_together_are_given_their_shares(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", *pair, "--together", "--memory", "80GB", "--max-model-len", "8192"]
    assert main([*asked, "--max-num-seqs", "16"]) == 0
    out = capsys.readouterr().out
    assert "Fits together: all requests of each need" in out and "of 72.0 GB (90% of 80.0 GB)" in out
    shares = [int(each) for each in re.findall(r"(?:llama|half) (\d+)[,.]", out)]
    assert len(shares) == 2 and 0 < shares[1] < shares[0] and sum(shares) <= 90

    assert main([*asked, "--max-num-seqs", "64"]) == 0
    assert "Fits together with fewer requests at once" in capsys.readouterr().out


def test_models_that_do_not_fit_together_are_refused_with_the_sum_and_the_limit(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", *pair, "--together", "--memory", "24GB", "--max-model-len", "8192"]
    assert main(asked) == 3
    out = capsys.readouterr().out
    least = sum(float(each) for each in re.findall(r"(\d+\.\d) GB", out)[:8]) - sum(
        float(each) for each in re.findall(r"(\d+\.\d) GB", out)[3:8:4]
    )
    (said,) = re.findall(r"one request of each needs (\d+\.\d) GB, and 21\.6 GB", out)
    assert float(said) == pytest.approx(least, abs=0.4)
    assert "spec.sharing" in out
    assert main(["size", pair[0], "--memory", "24GB", "--max-model-len", "8192"]) == 0, "each fits alone"


def test_what_fits_together_is_the_sum_of_what_fits_alone(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--max-model-len", "8192", "--max-num-seqs", "4", "--memory", "80GB", "-o", "json"]
    assert main(["size", *pair, "--together", *asked]) == 0
    both = json.loads(capsys.readouterr().out)
    alone = []
    for one in pair:
        assert main(["size", one, *asked]) == 0
        budget = json.loads(capsys.readouterr().out)
        alone.append(budget["weights"] + budget["workspace"] + budget["kv_wanted"])
    assert both["profiles"][0]["most"] == sum(alone)
    assert both["profiles"][0]["verdict"] == "Fits"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--memory", "80GB"], "with --together"),
        (["--together", "--memory", "80GB", "--tensor", "2"], "drop --tensor"),
    ],
)
def test_several_models_are_refused_where_they_cannot_be_sized(
    pair: list[str], arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *pair, *arguments]) == 1
    assert error in capsys.readouterr().err
