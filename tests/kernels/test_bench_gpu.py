"""All parts of `make bench-gpu` work, in tiny form in Triton's interpreter."""

import ast
import re
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import report, sizes, tensor, tuning
from bench.gpu.ledger import Ledger, OutOfTimeError, read
from bench.gpu.place import here

MINUTES = re.compile(r"^\| `(\w+)` \|.*\| (\d+) \|$", re.MULTILINE)


def run(folder: Path, *more: str) -> tuple[int, str]:
    status = command.main(["--tiny", "--out", str(folder), *more])
    return status, (folder / "gpu.md").read_text()


@pytest.mark.kernels
@pytest.mark.parametrize("part", report.PARTS)
def test_a_part_fills_all_its_rows_and_a_second_run_measures_nothing(part: str, tmp_path: Path) -> None:
    status, page = run(tmp_path, "--only", part)
    (section,) = (text for text in page.split("\n## ") if text.startswith(report.PARTS[part].TITLE))
    missing = [line.split("|")[1].strip() for line in section.splitlines() if report.NOT_MEASURED in line]
    assert status == 0 and missing == [*(tensor.OF_NODES if part == "tensor" else ())]
    assert torch.cuda.is_available() or "whose figures mean nothing" in page
    files = {path.name: path.read_bytes() for path in (tmp_path / "gpu").iterdir()}
    assert files.keys() == {f"{part}.json", *(["tuned_configs.py"] if part == "tuning" else [])}
    run(tmp_path, "--only", part)
    assert {path.name: path.read_bytes() for path in (tmp_path / "gpu").iterdir()} == files


def test_all_parts_together_have_25_minutes_and_the_page_says_which_has_how_many() -> None:
    seconds = {name: part.SECONDS for name, part in report.PARTS.items()}
    assert sum(seconds.values()) <= 25 * 60 and max(seconds.values()) <= 8 * 60
    said = MINUTES.findall((command.ROOT / "docs" / "gpu.md").read_text())
    assert {name: int(count) for name, count in said} == seconds


@pytest.mark.kernels
def test_a_part_that_runs_out_of_time_ends_and_leaves_the_rest_to_the_next_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_GRACE_SECONDS", 1000)
    assert not command.in_process("kernels", tmp_path / "gpu", time.time() + 900, tiny=True)
    assert "the time is up before" in capfd.readouterr().out
    assert not (tmp_path / "gpu" / "kernels.json").exists()


def test_the_committed_page_is_what_the_report_generates(
    tmp_path: Path,
) -> None:
    page = (command.RESULTS / "gpu.md").read_text()
    assert page == report.page(command.RESULTS / "gpu", sizes.FULL), "run `python -m bench.gpu --report`"
    if not (command.RESULTS / "gpu").exists():
        goals = [goal for part in report.PARTS.values() for goal in part.goals(sizes.FULL)]
        assert page.count(report.NOT_MEASURED) == len(goals)


def test_a_failure_is_a_row_and_the_next_one_is_measured(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "x.json", {}, time.time() + 60)
    ledger.measure("bad", lambda: {"us": 1 / 0})
    ledger.measure("good", lambda: {"us": 1.0})
    again = Ledger(tmp_path / "x.json", {}, time.time() + 60)
    again.measure("good", lambda: {"us": 2.0})
    assert again.rows == {"bad": {"error": "ZeroDivisionError: division by zero"}, "good": {"us": 1.0}}


def test_a_row_that_ended_the_process_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "x.json"

    class End(BaseException):
        pass

    def crash() -> dict[str, object]:
        raise End

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(End):
        Ledger(path, {}, time.time() + 60).measure("a", crash)
    with pytest.raises(RuntimeError, match="illegal"):
        Ledger(path, {}, time.time() + 60, broken).measure("b", lambda: {"us": 1 / 0})
    Ledger(path, {}, time.time() + 60).measure("a", crash)
    document = read(path)
    assert document is not None
    errors = {key: row["error"] for key, row in document["rows"].items()}
    assert errors["a"].startswith("the process ended") and errors["b"].startswith("ZeroDivisionError")


def test_no_measurement_starts_after_the_deadline(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "x.json", {}, time.time() - 1)
    with pytest.raises(OutOfTimeError):
        ledger.measure("late", lambda: {"us": 1.0})
    assert ledger.rows == {}


def test_the_table_has_the_fastest_config_for_each_key_and_is_python() -> None:
    with here() as place:
        ways = list(tuning.ways(sizes.FULL, place))
    rows = {way.name: {"us": 100.0 - index} for index, way in enumerate(ways)}
    last = {(way.table, way.key): way.entry for way in ways}
    rows[ways[1].name] = {"error": "out of shared memory"}
    tables = {
        node.target.id: ast.literal_eval(node.value)
        for node in ast.parse(tuning.table(ways, rows)).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
    }
    assert {(name, key): entry for name, table in tables.items() for key, entry in table.items()} == last
    assert tuning.table(ways, {}) == tuning.FILE.read_text(), "nothing measured: nothing changes"


def test_without_a_gpu_it_says_what_can_be_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing", "--out", str(tmp_path)])
    assert "there is no part nothing" in capsys.readouterr().err
    with here() as place:
        if place.device.type == "cuda":
            return
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path)])
    assert "--tiny" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
