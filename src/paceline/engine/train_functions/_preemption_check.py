"""Whether a run is to make room, asked in its train function, with one answer for all ranks."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import core
from paceline.journal import RunDirectory
from paceline.workers import RankInfo
from paceline.workers.runs import RunSpec, note_listener

# How often the chief looks, and tells the others, in seconds.
_INTERVAL_S = 0.5
_MOST_CALLS = 10_000


class PreemptionCheck:
    """Tell all ranks at the same call that the run is to make room.

    The chief looks every half second. At a call that was agreed on before, it tells the others
    what it has seen and how many calls later it tells them again; all other calls cost nothing.

    Args:
        spec: The run.
        rank_info: The rank.
        device: Where the process group communicates.
    """

    def __init__(self, spec: RunSpec, rank_info: RankInfo, device: torch.device) -> None:
        run = RunDirectory(Path(spec.run_dir))
        self._rank_info = rank_info
        self._device = device
        self._control = core.ControlFile(run)
        self._num_left = 1
        self._num_between = 1
        self._asked_at = time.monotonic()
        self.is_preempted = False
        if rank_info.rank == 0:
            note_listener(run)

    def is_due(self) -> bool:
        """Return the answer; every rank must call equally often."""
        self._num_left -= 1
        if self.is_preempted or self._num_left:
            return self.is_preempted
        told = [0, 0]
        if self._rank_info.rank == 0:
            told = [self._control.read().should_preempt, self._calls_until_next()]
        if self._rank_info.world_size > 1:
            message = torch.tensor(told, dtype=torch.int64, device=self._device)
            dist.broadcast(message, src=0)
            told = message.tolist()
        self.is_preempted, self._num_left = bool(told[0]), told[1]
        return self.is_preempted

    def _calls_until_next(self) -> int:
        """Return how many calls are made in half a second, as far as the last ones tell."""
        now = time.monotonic()
        seconds, self._asked_at = max(now - self._asked_at, 1e-6), now
        wanted = int(self._num_between * _INTERVAL_S / seconds)
        # A first call after a long pause must not decide for long.
        self._num_between = max(1, min(wanted, 10 * self._num_between, _MOST_CALLS))
        return self._num_between
