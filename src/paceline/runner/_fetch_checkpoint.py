"""Fetching the checkpoint that an attempt goes on from, where the master has it alone."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from paceline import faults
from paceline.messages.attempts import CheckpointFiles
from paceline.runner._master_link import MasterLink
from paceline.runner._repeated_get import RepeatedGet
from paceline.storage import CheckpointCorruptError, DirectoryStorage, IncomingCheckpoint

logger = logging.getLogger(__name__)

faults.register("runner.checkpoint.piece_fetched")

_SENDER = "master"
_MAX_TRIES = 3


def fetch_checkpoint(
    link: MasterLink,
    attempt_id: int,
    uuid: str,
    target: Path,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Fetch a checkpoint from the master into a storage directory, unless it is there.

    What arrived before a failure stays, and the rest follows. Files are compared with the manifest.

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
    for _ in range(_MAX_TRIES):
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
    """Fetch what is missing of a checkpoint; False if it is not wanted any more."""
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
            # One that is too long is damaged, which is found at the end.
            offset = incoming.write(name, offset, data[: wanted - offset])
            faults.reach("runner.checkpoint.piece_fetched")
            if offset >= wanted:
                break
    return True
