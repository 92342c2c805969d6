"""How a training has ended, and where it is."""

from pathlib import Path

import pytest

from paceline._base.progress_display import locations_of
from paceline.core import PreemptedError
from paceline.core._train_context import ending_of


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "completed"),
        (SystemExit(0), "completed"),
        (SystemExit(3), "failed (SystemExit)"),
        (KeyboardInterrupt(), "interrupted"),
        (PreemptedError(), "preempted"),
        (ValueError("broken"), "failed (ValueError)"),
    ],
)
def test_an_end_has_a_word(error: BaseException | None, expected: str) -> None:
    assert ending_of(error) == expected


def test_places_are_relative_to_the_working_directory_if_they_are_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "paceline_runs" / "x"
    monkeypatch.chdir(tmp_path)
    assert locations_of(run, None, None) == ("run paceline_runs/x",)
    assert locations_of(run, str(run / "checkpoints"), "u-1")[1] == "checkpoint u-1"
    assert locations_of(run, str(tmp_path / "kept"), "u-1")[1] == "checkpoint kept/u-1"
    assert locations_of(run, f"{run}-old", "u-1")[1] == "checkpoint paceline_runs/x-old/u-1"
    assert locations_of(run, "s3://bucket/kept", "u-1")[1] == "checkpoint s3://bucket/kept/u-1"
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert locations_of(run, None, None) == (f"run {run}",)
    other.rmdir()
    assert locations_of(run, str(run / "checkpoints"), "u-1") == (f"run {run}", "checkpoint u-1")
