"""Numbers, times and tables."""

from importlib import import_module
from typing import Any

import pytest

from paceline._cluster.messages.experiment_models import LogLine
from paceline.cli import _console_output
from paceline.cli._errors import _USER_ERRORS
from paceline.cli._experiment_follower import format_log_line, print_log_lines


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (3, "3"),
        (0.123456, "0.1235"),
        (1.0, "1"),
        (123456789.0, "123456789"),
        (-1.7e308, "-1.7e+308"),
        (1.5e-7, "1.5e-07"),
        ({"$float": "nan"}, "nan"),
        ({"$float": "-inf"}, "-inf"),
        (True, "True"),
        ("adam", "adam"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_values_are_short(value: Any, expected: str) -> None:
    assert _console_output.format_number(value) == expected


def test_nested_values_have_dotted_names() -> None:
    assert (
        _console_output.format_values({"a": {"b": 1, "c": {"d": 2.5}}, "e": "x"})
        == "a.b=1 a.c.d=2.5 e=x"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0s"), (59.9, "59s"), (61, "1m 1s"), (7500, "2h 5m"), (180_000, "2d 2h")],
)
def test_durations_have_two_units(seconds: float, expected: str) -> None:
    assert _console_output.format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 1024**4, "3.0 TiB")],
)
def test_sizes_are_binary(size: int, expected: str) -> None:
    assert _console_output.format_bytes(size) == expected


def test_lines_in_a_pipe_end_without_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """One long cell would widen all lines."""
    _console_output.print_facts([("State", "RUNNING"), ("Problems", "many words " * 30)])
    _console_output.print_table(["Name", "Why"], [("first", "many words " * 9), ("second", "one")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "State     RUNNING"
    assert lines[-1] == "second  one"
    assert [line for line in lines if line.endswith(" ")] == []


def test_a_table_in_a_pipe_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 150
    _console_output.print_table(
        ["Name", "Count"], [(long, 3), ("[red]markup", None)], right=["Count"]
    )
    output = capsys.readouterr().out
    assert long in output
    assert "[red]markup" in output
    assert "\x1b" not in output
    assert [line.split()[-1] for line in output.splitlines()[2:]] == ["3", "-"]


def test_a_long_name_is_shortened_to_what_the_other_columns_leave(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_console_output, "_PIPE_WIDTH", 40)
    row = [1, "a-name-of-several-words-in-one", "3s ago"]
    _console_output.print_table(["ID", "Name", "Created"], [row], shortened=["Name"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 40
    assert "a-name-of-" in lines[2]
    assert lines[2].split()[1:] == [lines[2].split()[1], "3s", "ago"]
    assert "…" in lines[2]


def test_a_narrow_terminal_leaves_out_spare_columns_before_it_cuts_a_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles, row = ["Run", "State", "Batches", "Started"], ["20261201-052358-train", "ok", 3, "now"]
    shown = []
    for width in (49, 40, 31):
        monkeypatch.setattr(_console_output, "_PIPE_WIDTH", width)
        _console_output.print_table(
            titles, [row], shortened=["Run"], spare=["Batches", "Started", "State"]
        )
        lines = capsys.readouterr().out.splitlines()
        shown.append(lines[0].split())
        assert lines[2].startswith("20261201-052358-train  ok")
    assert shown == [titles, ["Run", "State", "Started"], ["Run", "State"]]


def test_a_sentence_goes_on_in_further_lines_beside_shortened_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_console_output, "_PIPE_WIDTH", 80)
    why = (
        "It needs more slots than there are, and this is why: " + "the runner is away " * 5 + "end"
    )
    row = ["default", "a-name-of-several-words-in-one", why]
    _console_output.print_table(["Pool", "Name", "Why"], [row], shortened=["Name"], wrapped="Why")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "default  a-name-of-several-words-" in lines[2]
    assert " ".join(line[-40:] for line in lines[2:]).split()[-1] == "end"


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _console_output.print_table(["Name"], [], empty="No trials yet.")
    assert capsys.readouterr().out == "No trials yet.\n"


def test_a_terminal_shows_the_colours_of_a_log_and_a_pipe_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours alone reach a terminal: what else could change it is a blank, wherever it stands."""
    fields: dict[str, Any] = {"trial_id": 5, "attempt": 1, "time": 0.0, "rank": None}
    line = LogLine(
        id=1, stream="stdout", level="ERROR", text="a red\x1b[2J", colors=[(2, "31"), (5, "0")],
        **fields,
    )  # fmt: skip
    print_log_lines([line])
    assert capsys.readouterr().out == "a red [2J\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_log_lines([line])
    assert capsys.readouterr().out == "a \x1b[31mred\x1b[0m [2J\n"


@pytest.mark.parametrize(
    ("rank", "options", "expected"),
    [
        (None, {}, "a  b"),
        (0, {}, "a  b"),
        (2, {}, "[rank=2] a  b"),
        (1, {"show_trial": True}, "[trial 5] [rank=1] a  b"),
    ],
)
def test_a_log_line_names_its_origin_and_holds_no_control_characters(
    rank: int | None, options: dict[str, bool], expected: str
) -> None:
    line = LogLine(
        id=1,
        trial_id=5,
        attempt=1,
        time=0.0,
        rank=rank,
        stream="stdout",
        level=None,
        text="a\x1b\x07b",
    )
    assert format_log_line(line, **options) == expected


def test_every_error_of_the_user_has_the_name_that_the_command_line_knows() -> None:
    for name in sorted(_USER_ERRORS):
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(import_module(module), kind), Exception)
