"""Sending a run that was made without a master to one."""

import os
import time
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
        lease_s: How long the master may hear nothing until it takes a run that goes on for lost, in
            seconds. Whoever gives it calls `send` again and again. By default for ever.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """

    def __init__(
        self, client: "Client", path: str | os.PathLike[str], *, lease_s: float | None = None
    ) -> None:
        self._session = client._session
        self._run = RunDirectory.open(Path(os.path.abspath(path)))
        self._info = self._run.read_info()
        self._tail: RunTail | None = None
        self._lease_s = lease_s
        self._sent: dict[JournalKey, int] = {}
        self._last: RunReply | None = None
        self._last_at = 0.0

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
            self._tail = self._last = None
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
            if is_alive and not found and (kept := self._kept_reply()) is not None:
                reply = kept
            else:
                reply = self._post(found, is_alive=is_alive or not is_rest)
            if _lacks_records(reply, found):
                # The master has lost what it had, such as its database. The journals have it.
                tail = self._register()
                continue
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
        self._sent = dict(marks)
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
                self._sent.get(key, -1),
            )
            for key, entries in found
        ]
        body = RawRunRecords(
            batches=batches, is_alive=is_alive, moved=self._moved(), lease_s=self._lease_s
        )
        content = msgspec.json.encode(body)
        sent_at = time.monotonic()
        response = self._session.send("POST", f"{self._url}/records", content=content)
        self._last = msgspec.json.decode(response.content, type=RunReply)
        self._last_at = sent_at
        self._sent |= {key: entries[-1].sequence for key, entries in found if entries}
        return self._last

    def _kept_reply(self) -> "RunReply | None":
        """Return the last reply if the master need not hear yet that the run goes on."""
        if self._lease_s is None or time.monotonic() > self._last_at + self._lease_s / 3:
            return None
        return self._last

    @property
    def _url(self) -> str:
        return f"runs/{self._info.run_id}"

    def _moved(self) -> dict[str, str]:
        """Return where the run's checkpoints are, if its directory was renamed or copied."""
        from paceline.core import moved_storage

        return moved_storage(self._run, self._info)


def _lacks_records(reply: "RunReply", sent: list[tuple[JournalKey, list[Entry]]]) -> bool:
    stored = {JournalKey(m.attempt, m.generation, m.rank): m.sequence for m in reply.marks}
    return any(entries[-1].sequence > stored.get(key, -1) for key, entries in sent if entries)
