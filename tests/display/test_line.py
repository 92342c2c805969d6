"""The line of text about progress."""

from typing import Any

import pytest

from paceline.display._line import Facts, progress_line


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {"total": 10_000, "unit": "batches", "completed": 2500, "per_second": 50.0,
             "records_per_second": 1600.0, "metrics": {"loss": 0.123456, "accuracy": 1.0}},
            "[#####---------------]  2,500/10,000 batches  50 batches/s  1,600 records/s"
            "  ETA 0:02:30  loss=0.1235  accuracy=1",
        ),
        (
            {"total": 4, "unit": "epochs", "completed": 1.25, "per_second": 0.0005,
             "records_per_second": 12.345, "note": "validating"},
            "[######--------------]  1.25/4 epochs  12.3 records/s  ETA 1:31:40  validating",
        ),
        (
            {"total": None, "unit": "records", "completed": 5000, "records_per_second": 100.0,
             "elapsed_s": 90_061.0},
            "5,000 records  100 records/s  1 d 1:01:01 elapsed",
        ),
        (
            {"total": 10, "unit": "batches", "completed": 10, "per_second": 1.0, "elapsed_s": 10.4},
            "[####################]  10/10 batches  1 batches/s  in 0:00:10",
        ),
        ({"total": 10, "unit": "batches"}, "[--------------------]  0/10 batches"),
        (
            {"total": 10, "unit": "epochs", "completed": 1, "per_second": 1e-9},
            "[##------------------]  1/10 epochs  ETA over 99 days",
        ),
        (
            {"total": 10, "unit": "epochs", "completed": 11, "metrics": {"loss": float("nan")}},
            "[####################]  11/10 epochs  in 0:00:00  loss=nan",
        ),
    ],
)  # fmt: skip
def test_a_line_tells_what_is_known(facts: dict[str, Any], expected: str) -> None:
    assert progress_line(Facts(**facts), 200) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (40, "[##########----------]  5/10 batches"),
        (52, "[##########----------]  5/10 batches  a=1  b=2  c=3"),
        (47, "[##########----------]  5/10 batches  a=1  b=2"),
        (22, "[##########----------]"),
    ],
)
def test_what_does_not_fit_is_left_out_as_a_whole(width: int, expected: str) -> None:
    facts = Facts(total=10, unit="batches", completed=5, metrics={"a": 1.0, "b": 2.0, "c": 3.0})
    assert progress_line(facts, width) == expected


def test_a_note_goes_before_rates_and_metrics() -> None:
    facts = Facts(
        total=10, unit="batches", completed=5, per_second=1.0, note="validating", metrics={"a": 1.0}
    )
    expected = "[##########----------]  5/10 batches"
    assert progress_line(facts, 55) == f"{expected}  validating  a=1"
    assert progress_line(facts, 63) == f"{expected}  1 batches/s  validating"
    assert progress_line(facts, 40) == expected


def test_of_the_metrics_numbers_are_shown_and_counts_left_out() -> None:
    metrics = {"best": True, "confusion": [[1, 2]], "name": "x", "loss": 2, "batches": 7}
    line = progress_line(Facts(total=None, unit="records", metrics=metrics), 100)
    assert line == "0 records  0:00:00 elapsed  best=1  loss=2"


def test_characters_that_would_move_the_cursor_become_blanks() -> None:
    facts = Facts(total=None, unit="batches", note="one\ntwo\x1b[2Jthree")
    assert progress_line(facts, 80).endswith("one two [2Jthree")


def test_wide_characters_count_for_two_columns() -> None:
    facts = Facts(total=None, unit="batches", note="検証中")
    assert progress_line(facts, 33) == "0 batches  検証中"
    assert progress_line(facts, 34) == "0 batches  0:00:00 elapsed  検証中"
