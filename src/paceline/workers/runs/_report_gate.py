"""Stepwise runs in a worker: each report waits until the driver lets the function go on."""

import time
from collections.abc import Callable
from pathlib import Path

from paceline.core import ControlFile, PreemptedError
from paceline.journal import Control, RunDirectory
from paceline.workers.remote._driver_link import driver_link
from paceline.workers.runs._run_spec import RankInfo, RunSpec

_FIRST_INTERVAL_S = 0.001
_LONGEST_INTERVAL_S = 0.02
# How long another rank than the chief waits for the chief to come to the same report, in seconds.
_LONGEST_LAG_S = 1.0


class StoppedError(PreemptedError):
    """Raised by `report` when the driver of a stepwise run ends the run there."""


class ReportGate:
    """Hold a rank at its reports until the driver of a stepwise run lets it go on.

    The chief waits at each of its reports. Another rank waits beside it only as long as it reports
    as often as the chief, so that a stop ends all ranks at the same report. A rank that reports
    more often may be needed by the chief, so it stops to wait after a second.

    Args:
        spec: The run.
        rank_info: The rank.
    """

    def __init__(self, spec: RunSpec, rank_info: RankInfo) -> None:
        self._read = _control_reader(Path(spec.run_dir))
        self._is_chief = rank_info.rank == 0
        self._is_in_step = True

    def wait(self, number: int) -> None:
        """Wait at a report.

        Args:
            number: The number of this rank's report.

        Raises:
            StoppedError: The driver ends the run.
        """
        began, interval_s = time.monotonic(), _FIRST_INTERVAL_S
        while True:
            control = self._read()
            if control.is_stopped:
                raise StoppedError
            released = control.reports_released or 0
            if number <= released or not self._is_in_step:
                return
            if not self._is_chief and time.monotonic() - began > _LONGEST_LAG_S:
                # The chief may have come meanwhile, but then it has to be waited for anyway.
                self._is_in_step = False
                return
            time.sleep(interval_s)
            interval_s = min(2 * interval_s, _LONGEST_INTERVAL_S)


def _control_reader(run_dir: Path) -> Callable[[], Control]:
    run = RunDirectory(run_dir)
    link = driver_link()
    if link is None or run.control_path.parent.exists():
        return ControlFile(run).read

    def ask() -> Control:
        control: Control = link.ask("control", str(run_dir))
        return control

    return ask
