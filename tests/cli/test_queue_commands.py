"""What `job list` prints of the trials that wait, and what `job move` changes of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COLUMNS = ["Pool", "Ahead", "Trial", "Experiment", "Slots", "Rank", "Waits since", "Why"]


@pytest.fixture
def queued(paceline: Any, code: Path) -> Iterator[Any]:
    """Run the command line where experiment 1 holds both slots, and 2, 3 (two slots) and 4 wait."""
    paceline("up", "--detach", "--port", 0, "--slots", 2)
    try:
        assert paceline("job", "list").stdout == "Nothing waits for slots.\n"
        for name, slots in (("holder", 2), ("first", 1), ("wide", 2), ("last", 1)):
            options = (f"name={name}", f"resources.slots_per_trial={slots}", "data.held_at=1")
            given = [word for option in options for word in ("--config", option)]
            paceline("e", "create", code / "config.yaml", code, *given)
        yield paceline
    finally:
        paceline("down", "--timeout", 1)


def rows(run: Any, *options: object) -> list[str]:
    """Return the lines of `job list` below its titles, with bars between their cells."""
    titles, _, *lines = run("job", "list", *options).stdout.splitlines()
    assert re.split(r"\s{2,}", titles) == COLUMNS
    lines = [re.sub(r"\S+( \S+)? ago", "AGE", line) for line in lines]
    return [re.sub(r"\s{2,}", "|", line) for line in lines]


@pytest.mark.long
def test_a_row_has_the_place_the_slots_and_the_reason_of_a_trial_that_waits(queued: Any) -> None:
    expected = [
        "default|0|2|2 first|1|AGE|It waits until 1 of 2 slots is free.",
        "default|1|3|3 wide|2|AGE|Trial 2 of experiment 2 comes before it and waits for 1 slot.",
        "default|2|4|4 last|1|AGE|Trial 2 of experiment 2 comes before it and waits for 1 slot.",
    ]
    assert rows(queued) == rows(queued, "--pool", "default") == expected
    assert rows(queued, "--limit", 1) == expected[:1]
    told = queued("job", "list", "--pool", "other").stdout
    assert told == "Nothing waits for slots in the pool 'other'.\n"
    first, second, _ = json.loads(queued("job", "list", "--json").stdout)
    assert (first["trial_id"], first["reason"], first["num_ahead"]) == (2, "slots_in_use", 0)
    assert (second["reason"], second["behind_trial_id"]) == ("behind_others", 2)


@pytest.mark.long
def test_a_row_has_the_rank_by_which_its_pool_decides(queued: Any) -> None:
    queued("pool", "set", "default", "--policy", "priority")
    queued("e", "set-priority", 4, 50)
    queued("e", "set-priority", 3, 45)
    assert [row.split("|")[3:6] for row in rows(queued)] == [
        ["2 first", "1", "priority 42"],
        ["3 wide", "2", "priority 45"],
        ["4 last", "1", "priority 50"],
    ]
    queued("pool", "set", "default", "--policy", "fair_share")
    queued("e", "set-weight", 4, 0.5)
    assert {tuple(row.split("|")[3:6:2]) for row in rows(queued)} >= {
        ("2 first", "weight 1"),
        ("4 last", "weight 0.5"),
    }


@pytest.mark.long
def test_a_move_changes_the_order_and_who_holds_up_whom(queued: Any) -> None:
    def order() -> list[str]:
        return [row.split("|")[3] for row in rows(queued)]

    told = queued("job", "move", 3, "--front").stdout
    assert told == "Experiment 3 is moved. `paceline job list` shows the order.\n"
    assert rows(queued) == [
        "default|0|3|3 wide|2|AGE|It waits until 2 of 2 slots are free.",
        "default|1|2|2 first|1|AGE|Trial 3 of experiment 3 comes before it and waits for 2 slots.",
        "default|2|4|4 last|1|AGE|Trial 3 of experiment 3 comes before it and waits for 2 slots.",
    ]
    queued("job", "move", 3, "--end")
    assert order() == ["2 first", "4 last", "3 wide"]
    queued("job", "move", 3, "--ahead-of", 4)
    assert order() == ["2 first", "3 wide", "4 last"]
    queued("job", "move", 2, "--behind", 3)
    assert order() == ["3 wide", "2 first", "4 last"]
    queued("e", "kill", 4)
    for options, why in (
        ((2,), "`--ahead-of ID`, `--behind ID`, `--front` and `--end` must be given, but got 0."),
        ((2, "--front", "--end"), "must be given, but got 2."),
        ((2, "--behind", 2), "Experiment 2 cannot go ahead of or behind itself."),
        ((9, "--front"), "There is no experiment 9."),
        ((2, "--behind", 9), "There is no experiment 9."),
        (
            (4, "--front"),
            "Experiment 4 must be active or paused to change when it gets slots, but is CANCELED.",
        ),
    ):
        assert why in queued("job", "move", *options, code=1).stderr
    assert order() == ["3 wide", "2 first"]
