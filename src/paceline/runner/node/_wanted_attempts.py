"""The attempts that the master wants on this node: started, shipped, and removed afterwards."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.messages.attempts import MasterAddress
from paceline.messages.node_runners import NodeLaunch
from paceline.runner._attempt_processes import AttemptProcesses
from paceline.runner._checkpoint_place import place_checkpoints
from paceline.runner._master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
    encode,
)

logger = logging.getLogger(__name__)


class WantedAttempts:
    """Have the processes of a node do what the master wants; used by one thread.

    Args:
        processes: The attempts of this machine.
        address_path: The file from which their runners read the address of the master.
        address: Returns that address with a token.

    Attributes:
        ids: The attempts that are wanted; None until the master has said it.
    """

    def __init__(
        self,
        processes: AttemptProcesses,
        address_path: Path,
        address: Callable[[str], MasterAddress],
    ) -> None:
        self._processes = processes
        self._address_path = address_path
        self._address = address
        self.ids: set[int] | None = None
        self._retry_at: dict[int, float] = {}
        self._pauses: dict[int, MasterBackoff] = {}

    def look_after(self, launches: dict[int, NodeLaunch], kill: list[int]) -> None:
        """Make what is here as it is wanted; for every wanted attempt in its own state."""
        if self.ids is None:
            return
        for attempt_id in kill:
            self._processes.kill_runner(attempt_id)
        for attempt_id in sorted(self.ids):
            self._look_after_one(attempt_id, launches.get(attempt_id))
        self._processes.clean(self.ids)
        for attempt_id in self._retry_at.keys() - self.ids:
            self._retry_at.pop(attempt_id, None)
            self._pauses.pop(attempt_id, None)

    def _look_after_one(self, attempt_id: int, launch: NodeLaunch | None) -> None:
        processes = self._processes
        is_prepared = processes.is_prepared(attempt_id)
        is_settled = processes.is_alive(attempt_id) if is_prepared else launch is None
        if is_settled or time.monotonic() < self._retry_at.get(attempt_id, 0.0):
            return
        pauses = self._pauses.setdefault(attempt_id, MasterBackoff(1.0, 30.0))
        self._retry_at[attempt_id] = time.monotonic() + pauses.next_s()
        try:
            if not is_prepared:
                assert launch is not None
                spec = msgspec.structs.replace(launch.spec, master=str(self._address_path))
                run = processes.directory(attempt_id).run
                spec, info = place_checkpoints(spec, launch.info, run)
                processes.prepare(spec, info, launch.secrets)
            if processes.was_started(attempt_id):
                processes.ship(attempt_id)
            else:
                processes.start(attempt_id)
        except Exception as error:
            logger.exception("Attempt %d cannot be started.", attempt_id)
            self._report_failure(attempt_id, launch, error)

    def _report_failure(self, attempt_id: int, launch: NodeLaunch | None, error: Exception) -> None:
        """Tell the master that an attempt cannot start, so that it need not wait for its lease."""
        # Loaded late: it needs much that a runner without attempts does not.
        from paceline.runner._attempt_end_report import make_attempt_end
        from paceline.runner._start_errors import judge_start

        if launch is None:
            return
        reason, kind = judge_start(error)
        end = make_attempt_end(reason, detail=f"{type(error).__name__}: {error}", kind=kind)
        address = self._address(launch.spec.token or "")
        try:
            path = f"/attempts/{attempt_id}/end?member={launch.spec.member}"
            sent = msgspec.structs.replace(end, sent_at=time.time())
            MasterLink(lambda: address).post(path, encode(sent))
        except (UnreachableError, RefusedByMasterError) as failure:
            logger.error("The end of attempt %d cannot be told: %s", attempt_id, failure)
