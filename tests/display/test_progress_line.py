"""The lines of text about progress."""

from typing import Any

import pytest

from paceline._base.progress_display import (
    ProgressFacts,
    format_duration,
    progress_line,
    report_line,
)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {"total": 10_000, "unit": "batches", "completed": 2500, "epoch": 3, "batches": 2500,
             "per_second": 50.0, "batches_per_second": 50.0, "records_per_second": 1600.0,
             "training": {"accuracy": 1.0, "loss": 0.123456}, "validation": {"loss": 0.25}},
            "batch 2,500 of 10,000  [#####---------------]  25%  epoch 3  50 batches/s"
            "  1,600 records/s  2m 30s left  loss=0.1235  validation_loss=0.25  accuracy=1",
        ),
        (
            {"total": 4, "unit": "epochs", "completed": 1.25, "epoch": 2, "batches": 1250,
             "per_second": 0.0005, "batches_per_second": 0.5, "note": "validating"},
            "epoch 2 of 4  [######--------------]  31%  batch 1,250  0.5 batches/s  1h 31m left"
            "  validating",
        ),
        (
            {"total": 4, "unit": "epochs", "completed": None, "epoch": 2, "batches": 7,
             "per_second": 0.5, "elapsed_s": 61},
            "epoch 2 of 4  batch 7  1m 1s elapsed",
        ),
        (
            {"total": None, "unit": "records", "completed": 5000, "epoch": 2,
             "records_per_second": 100.0, "elapsed_s": 90_061.0},
            "record 5,000  epoch 2  100 records/s  1d 1h elapsed",
        ),
        (
            {"total": 10, "unit": "batches", "completed": 10, "per_second": 1.0,
             "elapsed_s": 10.4, "ending": "completed"},
            "batch 10 of 10  [####################]  100%  completed in 10s",
        ),
        (
            {"total": 1000, "unit": "batches", "completed": 999, "elapsed_s": 3,
             "ending": "stopped"},
            "batch 999 of 1,000  [###################-]  99%  stopped after 3s",
        ),
        ({"total": 10, "unit": "epochs"}, "epoch 1 of 10  [--------------------]  0%"),
        ({"total": 10, "unit": "epochs", "completed": 1},
         "epoch 1 of 10  [##------------------]  10%"),
        ({"total": 10, "unit": "epochs", "completed": 1.5},
         "epoch 2 of 10  [###-----------------]  15%"),
        (
            {"total": 10, "unit": "reports", "completed": 1, "per_second": 1e-9},
            "report 1 of 10  [##------------------]  10%  over 99 days left",
        ),
        (
            {"total": 10, "unit": "records", "completed": 11, "training": {"loss": float("nan")}},
            "record 10 of 10  [####################]  100%  loss=nan",
        ),
    ],
)  # fmt: skip
def test_a_line_tells_what_is_known(facts: dict[str, Any], expected: str) -> None:
    assert progress_line(ProgressFacts(**facts), 200) == expected


TYPICAL: dict[str, Any] = {
    "total": 5, "unit": "epochs", "completed": 1.25, "epoch": 2, "batches": 1250,
    "per_second": 0.05, "batches_per_second": 62.5, "records_per_second": 2000.0,
    "training": {"accuracy": 0.5, "loss": 0.123456}, "validation": {"validation_loss": 0.1333333},
}  # fmt: skip


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (12, "epoch 2 of 5"),
        (17, "epoch 2 of 5  25%"),
        (29, "epoch 2 of 5  loss=0.1235"),
        (49, "epoch 2 of 5  loss=0.1235  validation_loss=0.1333"),
        (65, "epoch 2 of 5  62.5 batches/s  loss=0.1235  validation_loss=0.1333"),
        (79, "epoch 2 of 5  62.5 batches/s  1m 15s left  loss=0.1235  validation_loss=0.1333"),
        (
            83,
            "epoch 2 of 5  25%  62.5 batches/s  1m 15s left  loss=0.1235  validation_loss=0.1333",
        ),
        (
            None,
            "epoch 2 of 5  25%  batch 1,250  62.5 batches/s  1m 15s left"
            "  loss=0.1235  validation_loss=0.1333",
        ),
    ],
)
def test_what_does_not_fit_is_left_out_as_a_whole(width: int | None, expected: str) -> None:
    assert progress_line(ProgressFacts(**TYPICAL), width) == expected


def test_a_note_goes_before_the_time_rates_and_metrics() -> None:
    facts = ProgressFacts(**TYPICAL, note="storing a checkpoint")
    assert progress_line(facts, 45) == "epoch 2 of 5  25%  storing a checkpoint"
    expected = "epoch 2 of 5  storing a checkpoint  loss=0.1235"
    assert progress_line(facts, 47) == expected
    facts.note = "a note that is longer than what there is room for"
    assert progress_line(facts, 25) == "epoch 2 of 5  loss=0.1235"


def test_the_end_says_how_far_and_how_before_rates_and_metrics() -> None:
    facts = ProgressFacts(**TYPICAL, elapsed_s=5, ending="stopped")
    metrics = "loss=0.1235  validation_loss=0.1333"
    assert progress_line(facts, 26) == "epoch 2 of 5  25%  stopped"
    assert progress_line(facts, 70) == f"epoch 2 of 5  25%  stopped  {metrics}"
    assert progress_line(facts, 79) == f"epoch 2 of 5  25%  stopped after 5s  {metrics}"


def test_of_the_metrics_numbers_are_shown_and_counts_left_out() -> None:
    metrics = {"best": True, "confusion": [[1, 2]], "name": "x", "loss": 2, "batches": 7}
    facts = ProgressFacts(total=None, unit="records", training=metrics, validation={"epochs": 1})
    assert progress_line(facts, 90) == "record 0  0s elapsed  loss=2  best=1"


def test_a_report_has_all_its_metrics_and_says_if_it_is_no_training() -> None:
    facts = ProgressFacts(**TYPICAL)
    region = "epoch 2 of 5  25%  batch 1,250  62.5 batches/s  1m 15s left"
    assert report_line(facts, "training", facts.training) == f"{region}  loss=0.1235 accuracy=0.5"
    told = report_line(facts, "validation", {"loss": 1, "epochs": 1})
    assert told == f"{region}  validation: loss=1"


def test_characters_that_would_move_the_cursor_become_blanks() -> None:
    facts = ProgressFacts(total=None, unit="batches", note="one\ntwo\x1b[2Jthree")
    assert progress_line(facts, 80).endswith("one two [2Jthree")


def test_wide_characters_count_for_two_columns() -> None:
    facts = ProgressFacts(total=None, unit="batches", note="検証中")
    assert progress_line(facts, 26) == "batch 0  検証中"
    assert progress_line(facts, 27) == "batch 0  0s elapsed  検証中"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.9, "0s"), (59, "59s"), (60, "1m 0s"), (3661, "1h 1m"), (90_061, "1d 1h")],
)
def test_durations_have_at_most_two_units(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
