"""Runs of several hours become one table with the lowest and the highest of each cell."""

import pytest

from bench import ranges

MACHINE = "A CPU, 2 threads. Command: `make bench`."


def table(rate: int, ratio: str, machine: str = MACHINE) -> str:
    return (
        "## Decode (medians)\n\n| tok/s: median (best step) | x1 | x8 |\n|---|---:|---:|\n"
        f"| quire | {rate} (900) | 8 (9) |\n| quire / best | {ratio} | 1.10x |\n\nA note.\n\n{machine}\n"
    )


def test_each_cell_has_its_lowest_and_highest_number_and_one_that_stays_has_itself() -> None:
    found = ranges.merged([table(100, "1.31x"), table(95, "1.29x"), table(120, "1.40x")])
    assert "| quire | 95 to 120 | 8 |" in found
    assert "| quire / best | 1.29 to 1.40x | 1.10x |" in found
    assert found.startswith("## Decode (medians)\n") and found.endswith(f"{MACHINE}\n")


def test_runs_of_two_machines_make_two_tables_and_each_names_its_hours(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ranges, "RUNS", tmp_path)
    folder = tmp_path / "int4"
    folder.mkdir()
    for hour, rate, machine in (("T0825", 100, MACHINE), ("T0925", 90, MACHINE), ("T1025", 300, "Another.")):
        (folder / f"2026-11-29{hour}.md").write_text(table(rate, "1.30x", machine))
    text = ranges.report()
    assert "| quire | 90 to 100 | 8 |" in text and "| quire | 300 | 8 |" in text
    assert "ended at 2026-11-29T0825, 2026-11-29T0925 (UTC)." in text


@pytest.mark.parametrize(
    ("one", "other"),
    [("| x1 | x8 |", "| x8 | x1 |"), ("| quire |", "| other |"), ("| quire | 95 (900) | 8 (9) |\n", "")],
    ids=["columns in another order", "another row", "a row less"],
)
def test_runs_of_different_rows_or_columns_are_not_mixed(one: str, other: str) -> None:
    with pytest.raises(ValueError, match=r"Decode \(medians\): runs differ"):
        ranges.merged([table(95, "1.29x"), table(95, "1.29x").replace(one, other)])


def test_a_file_that_is_no_table_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ranges, "RUNS", tmp_path)
    (tmp_path / "int4").mkdir()
    (tmp_path / "int4/empty.md").touch()
    with pytest.raises(ValueError, match=r"empty\.md is no table"):
        ranges.report()
