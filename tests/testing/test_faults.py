import signal
from collections.abc import Callable
from typing import Any

import pytest

from paceline.testing import faults

LOOP = """
from paceline.testing import faults
faults.register("test.point", "test.other")
for number in range(5):
    faults.reach("test.other")
    print(number, flush=True)
    faults.reach("test.point")
"""


@pytest.mark.parametrize(("fault", "count"), [("test.point", 1), ("test.point:3", 3)])
def test_process_is_killed_when_it_reaches_the_point(
    run_python: Callable[..., Any], fault: str, count: int
) -> None:
    result = run_python(LOOP, PACELINE_FAULT=fault)
    assert result.returncode == -signal.SIGKILL
    assert len(result.stdout.split()) == count


@pytest.mark.parametrize("fault", ["test.nowhere", "test.point:9"])
def test_process_goes_on_when_it_never_reaches_the_point(
    run_python: Callable[..., Any], fault: str
) -> None:
    result = run_python(LOOP, PACELINE_FAULT=fault)
    assert result.returncode == 0
    assert len(result.stdout.split()) == 5


def test_unset_variable_costs_nothing_and_checks_nothing() -> None:
    faults.reach("test.never_registered")


def test_unregistered_point_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_FAULT", "test.some")
    with pytest.raises(ValueError, match="must be registered, but got 'test.unknown'"):
        faults.reach("test.unknown")


@pytest.mark.parametrize("count", ["0", "x", "-1"])
def test_wrong_count_is_refused(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    faults.register("test.count")
    monkeypatch.setenv("PACELINE_FAULT", f"test.count:{count}")
    with pytest.raises(ValueError, match="N >= 1"):
        faults.reach("test.count")
