"""Runners that end before they start their attempt: tried again, less and less often."""

from typing import Any

from paceline._cluster.master.executors import AttemptStatus, Executor, Launch


class Stillborn(Executor):
    """An executor whose runners end at once."""

    def __init__(self) -> None:
        self.num_started = 0

    def start(self, launch: Launch) -> None:
        """Count a start."""
        self.num_started += 1

    def status(self, attempt_id: int) -> AttemptStatus:
        """Tell that nothing was started."""
        return AttemptStatus.NOT_STARTED

    def ship(self, attempt_id: int) -> None:
        """Do nothing."""

    def kill_runner(self, attempt_id: int) -> None:
        """Do nothing."""

    def clean(self, keep: set[int]) -> None:
        """Do nothing."""


def test_an_attempt_whose_runners_end_before_it_starts_fails_after_some(bench: Any) -> None:
    executor = bench.reconciler._executor = Stillborn()
    experiment_id = bench.create("single")
    bench.schedule()
    for _ in range(3):
        bench.reconciler._watch_attempts()
    assert executor.num_started == 1
    for _ in range(10):
        assert bench.state(experiment_id) == "ACTIVE"
        bench.reconciler._next_runner.clear()
        bench.reconciler._watch_attempts()
    assert executor.num_started == 11
    bench.reconciler._watch_attempts()
    assert bench.state(experiment_id) == "ERROR"
    assert "11 runners ended before it began" in bench.trial(1).error
    bench.reconciler._watch_attempts()
    assert bench.reconciler._num_runners == bench.reconciler._next_runner == {}
