"""Progress at a real terminal."""

import io
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from paceline._base.progress_display import TrainingProgress

BUSY = """
import logging, sys, time
from concurrent.futures import ThreadPoolExecutor

# The handler keeps the stream that is there before progress begins.
logging.basicConfig(level="INFO", format="%(message)s")
from paceline._base.progress_display import TrainingProgress

progress = TrainingProgress(12, "batches")
progress.start(0)
for step in range(1, 13):
    if step == 3:
        logging.info("a log line")
    if step == 5:
        print("a printed line")
    if step == 6:
        print("one line", end=" ")
    if step == 8:
        print("in two parts")
    if step == 9:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(logging.warning, "from a thread").result()
    progress.update(step, 32 * step, {"loss": 1 / step})
    time.sleep(0.11)
progress.note("storing checkpoint")
progress.close()
print("afterwards", sorted(set(vars(sys.stderr)) | set(vars(sys.stdout))))
raise SystemExit("gone")
"""


def run(terminal: Any, code: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=terminal.stream,
        stderr=terminal.stream,
    )
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        terminal.read()
        time.sleep(0.01)
    terminal.read()


def test_what_the_program_writes_meanwhile_appears_whole_above_the_progress(terminal: Any) -> None:
    run(terminal, BUSY)
    *lines, progress, afterwards, last, end = terminal.screen
    assert lines == ["a log line", "a printed line", "one line in two parts", "from a thread"]
    assert progress.startswith("batch 12 of 12  [####################]  100%")
    assert progress.endswith("loss=0.08333")
    assert (afterwards, last, end) == ("afterwards ['mode']", "gone", "")
    assert "batch 2 of 12" in terminal.raw
    assert "storing checkpoint" in terminal.raw


def test_a_traceback_ends_the_progress_on_a_line_of_its_own(terminal: Any) -> None:
    code = """
from paceline._base.progress_display import TrainingProgress
progress = TrainingProgress(10, "batches")
progress.start(4)
raise RuntimeError("broken")
"""
    run(terminal, code)
    assert terminal.screen[0] == "Traceback (most recent call last):"
    assert terminal.screen[-2] == "RuntimeError: broken"


def test_it_is_drawn_at_most_ten_times_a_second(terminal: Any) -> None:
    progress = TrainingProgress(5000, "batches", stream=terminal.stream)
    begin = time.monotonic()
    progress.start(0)
    for step in range(5000):
        progress.update(step, step)
    seconds = time.monotonic() - begin
    assert terminal.read().count("batch ") - 1 <= 2 + 10 * seconds
    progress.close()


def test_a_burst_of_lines_is_not_interrupted_by_drawing(terminal: Any) -> None:
    progress = TrainingProgress(10, "batches", stream=terminal.stream)
    begin = time.monotonic()
    progress.start(0)
    for number in range(200):
        terminal.stream.write(f"line {number}\n")
        terminal.read()
    seconds = time.monotonic() - begin
    assert terminal.screen[:200] == [f"line {number}" for number in range(200)]
    assert terminal.raw.count("batch 0 of 10") <= 2 + 10 * seconds
    progress.close()
    assert terminal.screen[200:] == ["batch 0 of 10  [--------------------]  0%", ""]


def test_a_line_fits_the_terminal_and_follows_its_size(terminal: Any) -> None:
    terminal.resize(40)
    progress = TrainingProgress(10, "batches", stream=terminal.stream)
    progress.start(0)
    progress.note("a note that is longer than what is left")
    assert terminal.screen == ["batch 0 of 10  0%"]
    terminal.resize(90)
    progress.note("a note that is longer than what is left")
    assert terminal.screen[0].endswith("0%  a note that is longer than what is left")
    progress.close()


def test_a_note_stands_until_the_next_update(terminal: Any) -> None:
    progress = TrainingProgress(None, "epochs", stream=terminal.stream)
    progress.start(1)
    progress.note("validating")
    assert terminal.screen[0].endswith("elapsed  validating")
    progress.update(1.5, 10)
    progress.close()
    assert terminal.screen[0].startswith("epoch 2")
    assert terminal.screen[0].endswith("elapsed")


def test_closing_twice_and_telling_more_afterwards_does_nothing(terminal: Any) -> None:
    progress = TrainingProgress(10, "batches", stream=terminal.stream)
    progress.start(0)
    progress.close()
    progress.close()
    progress.update(1, 1)
    progress.note("late")
    assert terminal.screen == ["batch 0 of 10  [--------------------]  0%", ""]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_after_two_at_once_the_stream_is_as_before(terminal: Any, order: tuple[int, int]) -> None:
    both = [TrainingProgress(10, "batches", stream=terminal.stream) for _ in range(2)]
    for progress in both:
        progress.start(0)
    for index in order:
        both[index].close()
    terminal.read()
    terminal.stream.write("plain\n")
    terminal.stream.flush()
    assert terminal.read() == "plain\r\n"


def test_a_terminal_that_was_closed_does_no_harm(terminal: Any) -> None:
    progress = TrainingProgress(10, "batches", stream=terminal.stream)
    progress.start(0)
    descriptor = terminal.stream.fileno()
    kept = os.dup(descriptor)
    os.close(descriptor)
    try:
        progress.note("unseen")
        progress.close()
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


@pytest.mark.parametrize("environment", [{"PACELINE_PROGRESS": "0"}, {"CI": "true"}])
def test_the_environment_can_silence_it(
    terminal: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    show_everything(TrainingProgress(10, "batches", stream=terminal.stream))
    assert terminal.read() == ""


def show_everything(progress: TrainingProgress) -> None:
    progress.start(0)
    progress.note("note")
    progress.update(1, 1, {"loss": 1.0})
    progress.report({"loss": 2.0})
    progress.report({"loss": 3.0}, "validation")
    progress.end("stopped", "run here", "checkpoint there")
    progress.report({"loss": 4.0})
    progress.close()


LINES = [
    "batch 1 of 10  10%  loss=2",
    "batch 1 of 10  10%  validation: loss=3",
    "batch 1 of 10  10%  stopped after 0s  loss=2  validation_loss=3",
    "run here",
    "checkpoint there",
    "",
]


def told(text: str) -> list[str]:
    """Return lines without what depends on the time."""
    text = re.sub(r"  [\d.,]+ batches/s|  [^ ]+( \d+\w)? left", "", text)
    return re.sub(r"(after|in) \d+s", r"\1 0s", text).split("\n")


def test_other_ranks_stay_quiet(terminal: Any) -> None:
    show_everything(TrainingProgress(10, "batches", stream=terminal.stream, is_quiet=True))
    assert terminal.read() == ""


def test_a_stream_that_is_no_terminal_gets_a_line_per_report_and_the_end(terminal: Any) -> None:
    text = io.StringIO()
    show_everything(TrainingProgress(10, "batches", stream=text))
    assert told(text.getvalue()) == LINES
    text.close()
    show_everything(TrainingProgress(10, "batches", stream=text))


def test_a_terminal_that_cannot_go_back_gets_lines(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    show_everything(TrainingProgress(10, "batches", stream=terminal.stream))
    assert told(terminal.read().replace("\r\n", "\n")) == LINES


def test_a_program_without_a_console_shows_nothing(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    show_everything(TrainingProgress(10, "batches"))


def test_of_thousands_of_training_reports_a_log_has_one_a_second_and_all_validations(
    terminal: Any,
) -> None:
    text = io.StringIO()
    progress = TrainingProgress(5000, "batches", stream=text)
    begin = time.monotonic()
    progress.start(0)
    for step in range(1, 5001):
        progress.update(step, step)
        progress.report({"loss": 1.0})
        if step % 100 == 0:
            progress.report({"loss": 1.0}, "validation")
    seconds = time.monotonic() - begin
    progress.end("completed")
    lines = text.getvalue().splitlines()
    assert sum("validation:" in line for line in lines) == 50
    assert 100 <= len(lines) - 51 <= 101 + seconds
    assert lines[-1].startswith("batch 5,000 of 5,000  100%")


def test_the_end_stands_below_a_line_that_the_program_has_not_finished(terminal: Any) -> None:
    progress = TrainingProgress(10, "batches", stream=terminal.stream)
    progress.start(0)
    terminal.stream.write("half a line")
    progress.end("failed (ValueError)", "run " + 50 * "x", "checkpoint " + 50 * "y")
    assert terminal.screen == [
        "half a line",
        "batch 0 of 10  [--------------------]  0%  failed (ValueError) after 0s",
        "run " + 50 * "x",
        "checkpoint " + 50 * "y",
        "",
    ]


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="`unit` must be one of batches, .* but got 'steps'"):
        TrainingProgress(10, "steps")
