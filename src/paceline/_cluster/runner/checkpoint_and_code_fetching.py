"""Fetching of checkpoints and code from the master, in repeated requests."""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from paceline import faults
from paceline._cluster.messages.runner_messages import MAX_PIECE_BYTES, CheckpointFiles
from paceline._cluster.runner.master_link import MasterBackoff, MasterLink, UnreachableError
from paceline.storage._checkpoint_errors import CheckpointCorruptError
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._incoming_checkpoint import IncomingCheckpoint

logger = logging.getLogger(__name__)


_MAX_FETCHES = 3


class RepeatedGet:
    """Requests repeated until the master answers or the result is unwanted.

    Args:
        link: A connection to the master.
        what: The name of the file, for the runner's log.
        is_wanted: Asked before each request.
        tell: Called with each new reason why the file cannot be read now.
    """

    def __init__(
        self,
        link: MasterLink,
        what: str,
        is_wanted: Callable[[], bool],
        tell: Callable[[str], object] = logger.warning,
    ) -> None:
        self._link = link
        self._what = what
        self._is_wanted = is_wanted
        self._tell = tell
        # Since the last answer.
        self._told: set[str] = set()

    def get(self, path: str) -> bytes | None:
        """Return the content at a path of the master, None if not wanted any more.

        Raises:
            RefusedByMasterError: The master refused the request.
        """
        return self._repeat(lambda: self._link.get(path))

    def get_piece(self, path: str, offset: int, size: int) -> bytes | None:
        """Return a piece of the content at a path, shorter at the end; raises like `get`."""
        return self._repeat(lambda: self._link.get_piece(path, offset, size))

    def _repeat(self, get: Callable[[], bytes]) -> bytes | None:
        pauses = MasterBackoff()
        while self._is_wanted():
            try:
                found = get()
                self._told.clear()
                return found
            except UnreachableError as error:
                if str(error) not in self._told:
                    self._told.add(str(error))
                    self._tell(f"The {self._what} cannot be fetched now: {error}")
                time.sleep(pauses.next_s())
        return None


_SENDER = "master"


def fetch_checkpoint(
    link: MasterLink,
    attempt_id: int,
    uuid: str,
    target: Path,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Fetch a checkpoint from the master into a storage directory, unless present there.

    Files that arrived before a failure stay, and the rest follows. Files are compared with the
    manifest.

    Args:
        link: A connection to the master.
        attempt_id: The attempt.
        uuid: The checkpoint.
        target: The storage directory.
        is_wanted: Asked again and again; if it says no, fetching ends.

    Raises:
        RefusedByMasterError: The master does not give it.
        CheckpointCorruptError: It is damaged at the master, too.
        CheckpointWriteError: The disk is full.
    """
    storage = DirectoryStorage(target)
    if storage.exists(uuid):
        return
    path = f"/attempts/{attempt_id}/checkpoints/{uuid}"
    began = time.monotonic()
    fetch = RepeatedGet(link, "checkpoint", is_wanted)
    reply = fetch.get(path)
    if reply is None:
        return
    files = msgspec.json.decode(reply, type=CheckpointFiles)
    shards = {rank: text.encode() for rank, text in files.shards.items()}
    incoming = IncomingCheckpoint(storage, _SENDER, uuid, files.manifest.encode(), shards)
    for _ in range(_MAX_FETCHES):
        if not _fetch_missing(fetch, path, incoming):
            return
        problems = incoming.seal()
        if not problems:
            incoming.commit()
            logger.info("Checkpoint %s was fetched in %.1f s.", uuid, time.monotonic() - began)
            return
        logger.warning("Files of %s are fetched again: %s", uuid, problems)
    details = ", ".join(f"{name!r} {why}" for name, why in problems.items())
    raise CheckpointCorruptError(f"Checkpoint {uuid} must arrive whole, but {details}.")


def _fetch_missing(fetch: RepeatedGet, path: str, incoming: IncomingCheckpoint) -> bool:
    """Fetch the missing parts of a checkpoint; return False if not wanted any more."""
    for name, size in incoming.missing().items():
        offset, wanted = size, incoming.manifest.files[name].size
        while True:
            query = f"name={quote(name, safe='')}&offset={offset}"
            data = fetch.get(f"{path}/pieces?{query}")
            if data is None:
                return False
            if not data and offset < wanted:
                raise CheckpointCorruptError(
                    f"The file {name!r} must have {wanted} bytes, but the master has {offset}."
                )
            # Expected size only: an overlong file is damaged, as the final check finds out.
            offset = incoming.write(name, offset, data[: wanted - offset])
            faults.reach("runner.checkpoint.piece_fetched")
            if offset >= wanted:
                break
    return True


class DamagedCodeError(Exception):
    """Raised when code arrives with another digest, again and again."""


def fetch_code(
    link: MasterLink,
    digest: str,
    target: Path,
    is_wanted: Callable[[], bool],
    tell: Callable[[str], object],
) -> bool:
    """Fetch packed code from the master into a file; pieces received before a failure stay.

    Args:
        link: A connection to the master.
        digest: The SHA-256 of the code.
        target: The file.
        is_wanted: Asked before each piece; if it says no, fetching ends.
        tell: Called with each new reason why a piece does not arrive; it is requested again.

    Returns:
        Whether it is there: False if it is not wanted any more.

    Raises:
        RefusedByMasterError: The master does not give it.
        DamagedCodeError: It has another digest.
        OSError: The disk is full.
    """
    fetch = RepeatedGet(link, "code", is_wanted, tell)
    for _ in range(_MAX_FETCHES):
        found = _fetch_once(fetch, f"/contexts/{digest}", target)
        if found is None:
            return False
        if found == digest:
            return True
    raise DamagedCodeError(f"Code must arrive with the SHA-256 {digest}, but has {found}.")


def _fetch_once(fetch: RepeatedGet, path: str, target: Path) -> str | None:
    """Return the SHA-256 of the fetched content, None if not wanted any more."""
    hasher, size = hashlib.sha256(), 0
    with target.open("wb") as file:
        while True:
            data = fetch.get_piece(path, size, MAX_PIECE_BYTES)
            if data is None:
                return None
            file.write(data)
            hasher.update(data)
            size += len(data)
            # A short piece is the last one.
            if len(data) < MAX_PIECE_BYTES:
                return hasher.hexdigest()
