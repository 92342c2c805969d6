"""Sending a run that was made without a master to one."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.journal import Entry, JournalKey, RunDirectory, RunTail

if TYPE_CHECKING:
    from paceline.client._client import Client
    from paceline.messages.runs import RunReply

_MAX_RECORDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """Result of a sync: the experiment on the master, and the number of records just sent."""

    experiment_id: int
    trial_id: int
    num_records: int
    is_alive: bool


class RunSync:
    """Send what a run directory holds; the master shows it as an unmanaged experiment.

    What the master has already is not sent again, whoever sent it, so this may be done as often as
    one likes: while the run goes on, after its end, and after it was resumed.

    Args:
        client: The master to send to.
        path: The run directory; it stays as it is.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """

    def __init__(self, client: "Client", path: str | os.PathLike[str]) -> None:
        self._session = client._session
        self._run = RunDirectory.open(Path(os.path.abspath(path)))
        self._info = self._run.read_info()
        self._tail: RunTail | None = None

    @property
    def name(self) -> str:
        """The run's name."""
        return self._info.name

    def send(self) -> SyncResult:
        """Send what the master does not have yet.

        Raises:
            ApiError: The master refused the run, for example as a master started it.
            MasterUnreachableError: No master answers; the next call asks it what it has.
            JournalVersionError: A journal has another format version.
        """
        try:
            return self._send()
        except BaseException:
            # Nobody knows what has arrived.
            self._tail = None
            raise

    def _send(self) -> SyncResult:
        tail = self._tail or self._register()
        # Asked before reading: what a dead run wrote is all there.
        is_alive = self._run.is_alive()
        num_records = 0
        while True:
            found = tail.read(_MAX_RECORDS)
            num_read = sum(len(entries) for _, entries in found)
            num_records += num_read
            is_rest = num_read < _MAX_RECORDS
            if is_rest and not is_alive:
                found += tail.finish()
            reply = self._post(found, is_alive=is_alive or not is_rest)
            if is_rest:
                return SyncResult(
                    experiment_id=reply.experiment_id,
                    trial_id=reply.trial_id,
                    num_records=num_records,
                    is_alive=is_alive,
                )

    def _register(self) -> RunTail:
        from paceline.messages.runs import RunRegistration, RunReply

        body = RunRegistration(info=self._info, path=str(self._run.path))
        response = self._session.send("PUT", self._url, content=msgspec.json.encode(body))
        reply = msgspec.json.decode(response.content, type=RunReply)
        marks = {JournalKey(m.attempt, m.generation, m.rank): m.sequence for m in reply.marks}
        self._tail = RunTail(self._run, marks)
        return self._tail

    def _post(self, found: list[tuple[JournalKey, list[Entry]]], *, is_alive: bool) -> "RunReply":
        from paceline.messages.runs import RawRunBatch, RawRunRecords, RunReply

        batches = [
            RawRunBatch(
                key.attempt,
                key.generation,
                key.rank,
                [(entry.sequence, msgspec.Raw(entry.payload)) for entry in entries],
            )
            for key, entries in found
        ]
        body = RawRunRecords(batches=batches, is_alive=is_alive, moved=self._moved())
        content = msgspec.json.encode(body)
        response = self._session.send("POST", f"{self._url}/records", content=content)
        return msgspec.json.decode(response.content, type=RunReply)

    @property
    def _url(self) -> str:
        return f"runs/{self._info.run_id}"

    def _moved(self) -> dict[str, str]:
        """Return where the run's checkpoints are, if its directory was renamed or copied."""
        from paceline.core import moved_storage

        return moved_storage(self._run, self._info)
