"""Whether a run is to make room, asked in its train function, with one answer for all ranks."""

import signal
import threading
import time
from pathlib import Path

import torch

from paceline import core
from paceline.engine.gradients._travelling_signal import TravellingSignal
from paceline.journal import RunDirectory
from paceline.workers import RankInfo
from paceline.workers.runs import RunSpec, is_to_move, note_listener

# How often the chief looks for a word of the driver or the master, in seconds.
_LOOK_INTERVAL_S = 0.5


class PreemptionCheck:
    """Tell all ranks at the same call that the run is to make room.

    A signal to any rank counts, and the chief looks every half second for what the driver or the
    master says, and after a report for what a search of the master decides on it. The ranks tell
    each other at calls that they have agreed on before; all other calls cost nothing.

    Args:
        spec: The run.
        rank_info: The rank.
        device: Where the process group communicates.
        is_script: Whether this process is the user's script. SIGTERM to another worker is how its
            driver ends it, as after the error of a rank.
        decision: Knows the chief's newest report that a search judges.
    """

    def __init__(
        self,
        spec: RunSpec,
        rank_info: RankInfo,
        device: torch.device,
        *,
        is_script: bool,
        decision: core.SearchDecision,
    ) -> None:
        self._decision = decision
        self._run = run = RunDirectory(Path(spec.run_dir))
        self._rank_info = rank_info
        self._device = device
        self._control = core.ControlFile(run)
        self._next_look_s = 0.0
        self._is_wanted = False
        self._travelling = TravellingSignal(device)
        self._signals = core.SignalWatch()
        self.is_preempted = False
        # Elsewhere no signal can be noted, as for a driver in such a thread.
        if threading.current_thread() is threading.main_thread():
            signals = (signal.SIGTERM, signal.SIGUSR1) if is_script else (signal.SIGUSR1,)
            self._signals.install(signals)
        if rank_info.rank == 0:
            note_listener(run)

    def is_due(self) -> bool:
        """Return the answer; every rank must call equally often."""
        if self.is_preempted:
            return True
        self._look()
        if self._rank_info.world_size == 1:
            self.is_preempted = self._is_wanted
            return self.is_preempted
        if self._is_wanted:
            self._travelling.tell(1.0)
        # The next call may be an epoch away.
        self._travelling.travel_alone(self._device, is_awaited=True)
        self.is_preempted = self._travelling.hear() > 0
        return self.is_preempted

    def close(self) -> None:
        """Give the signals back."""
        self._signals.restore()

    def _look(self) -> None:
        self._is_wanted = self._is_wanted or self._signals.has_come
        if self._is_wanted or self._rank_info.rank != 0:
            return
        is_decided = self._decision.wait(self._is_told)
        now = time.monotonic()
        if is_decided or now >= self._next_look_s:
            self._next_look_s = now + _LOOK_INTERVAL_S
            self._is_wanted = self._is_told() or is_to_move(self._run)

    def _is_told(self) -> bool:
        return self._signals.has_come or self._control.read().should_preempt
