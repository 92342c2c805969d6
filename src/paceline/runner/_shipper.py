"""Shipping: what an attempt reported and printed, and how it ended."""

import logging
import time

from msgspec.structs import replace

from paceline.messages.attempts import AttemptEnd
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._master_link import MasterLink, encode
from paceline.runner._ship_checkpoints import CheckpointShipper
from paceline.runner._ship_output import OutputShipper
from paceline.runner._ship_records import OnJudged, RecordShipper
from paceline.runner._ship_shards import ShardShipper
from paceline.runner._shipping_loop import ShippingLoop

logger = logging.getLogger(__name__)


class Shipper:
    """Send records and output side by side, so that records never wait for output.

    Args:
        directory: The attempt's directory.
        attempt_id: The attempt's number with the master.
        link: The connection to the master.
        member: Which of the attempt's nodes this is.
        on_judged: Gets what the master wants once a search has judged records; see `RecordShipper`.
        is_first: Whether nothing was ever sent for the attempt.
    """

    def __init__(
        self,
        directory: AttemptDirectory,
        attempt_id: int,
        link: MasterLink,
        *,
        member: int = 0,
        on_judged: OnJudged = lambda _control, _judged: None,
        is_first: bool = False,
    ) -> None:
        self._directory = directory
        path, query = f"/attempts/{attempt_id}", f"?member={member}" if member else ""
        self._path, self._member = path, member
        self._end_path = f"{path}/end{query}"
        self._link = link
        self._has_started = False
        # Those of checkpoints, if the master does not share their directory.
        self._checkpoints: list[CheckpointShipper | ShardShipper] = []
        self.records = RecordShipper(
            directory,
            f"{path}/records{query}",
            link,
            on_judged=on_judged,
            is_first=is_first,
        )
        self.output = OutputShipper(
            directory, f"{path}/logs{query}", link.another(), is_first=is_first
        )

    def send_checkpoints(self) -> None:
        """Send checkpoints from now on, as the master does not share their directory."""
        self.records.has_checkpoints = False
        link, member = self._link.another(), self._member
        checkpoints = CheckpointShipper(self._directory, self._path, link, member)
        self._checkpoints = [checkpoints]
        if member:
            link = self._link.another()
            self._checkpoints.append(ShardShipper(self._directory, self._path, link, member))
        if self._has_started:
            for loop in self._checkpoints:
                loop.start()

    def note_end(self, end: AttemptEnd) -> None:
        """Take in how the attempt ended here, before the rest is sent."""
        for loop in self._checkpoints:
            if isinstance(loop, CheckpointShipper):
                loop.has_failed = end.has_failed

    def start(self) -> None:
        """Begin to send, in threads; trouble only delays."""
        self._has_started = True
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """End the threads; the one that sends output may take until `ship_output`."""
        for loop in self._loops:
            loop.stop()
        self.records.join()
        for loop in self._checkpoints:
            loop.join()

    def forget_positions(self) -> None:
        """Ask the master anew what it has; after a failure nobody knows what arrived."""
        for loop in self._loops:
            loop.forget_positions()

    def doubt_positions(self) -> None:
        """Have the threads ask the master anew what it has: it may be another one."""
        for loop in self._loops:
            loop.doubt_positions()

    def ship_records(self) -> None:
        """Send all records and checkpoints, and tell of damage at the ends of journals.

        For an attempt whose processes are dead.

        Raises:
            UnreachableError: The master did not answer.
            RefusedByMasterError: The master refused the request.
        """
        self.records.ship_rest()
        for loop in self._checkpoints:
            loop.ship_rest()
        self.records.ship_lost()

    def ship_output(self) -> str | None:
        """Send all output that is there, or say why the master does not take it.

        Raises:
            UnreachableError: The master takes nothing else either.
        """
        self.output.join()
        return self.output.ship_rest_or_tell(self.records.check_master)

    def ship_end(self, end: AttemptEnd) -> None:
        """Tell the master how the attempt ended; raises like `ship_records`."""
        self._link.post(self._end_path, encode(replace(end, sent_at=time.time())))

    def keep_output(self) -> None:
        """Let the output outlive the attempt's directory."""
        try:
            self._directory.keep_output()
        except OSError as error:
            logger.error("The output cannot be kept: %s", error)

    @property
    def set_aside(self) -> str | None:
        """What is known of the records that were set aside, None if there are none."""
        return self.records.set_aside

    @property
    def unreadable(self) -> str | None:
        """Why journals could not be read, None if all could."""
        return self.records.unreadable

    @property
    def unsent(self) -> str | None:
        """Which checkpoints could not be sent and why, None if all could."""
        found = (one.unsent for one in self._checkpoints if isinstance(one, CheckpointShipper))
        return next(found, None)

    def close(self) -> None:
        """Close the connections."""
        self.records.close()
        self.output.close()
        for loop in self._checkpoints:
            loop.close()

    @property
    def _loops(self) -> list[ShippingLoop]:
        return [self.records, self.output, *self._checkpoints]
