"""Sending files of checkpoints to the master, in pieces."""

import logging
from urllib.parse import quote

import msgspec
import xxhash

from paceline import faults
from paceline.messages.attempts import MAX_PIECE_BYTES, PieceReply
from paceline.runner._master_link import MasterLink, RefusedByMasterError
from paceline.storage import DirectoryStorage

logger = logging.getLogger(__name__)

faults.register("runner.checkpoint.piece_sent")

_MAX_TRIES = 5


class PieceSender:
    """Send what the master lacks of a checkpoint, one piece after the other.

    Args:
        link: The connection.
        path: Where the checkpoints of the attempt are in the API.
        storage: Where the files are.
        member: Which of the attempt's nodes this is.
    """

    def __init__(self, link: MasterLink, path: str, storage: DirectoryStorage, member: int) -> None:
        self._link = link
        self._path = path
        self._storage = storage
        self._member = member

    def send(self, uuid: str, missing: dict[str, int]) -> bool:
        """Send a piece of the first missing file, and note in `missing` what the master has then.

        Returns:
            False if the master does not know of the checkpoint.
        """
        name = next(iter(missing))
        data = self._storage.read_file(uuid, name, missing[name], MAX_PIECE_BYTES)
        num_bytes = self._put(uuid, name, missing[name], data)
        if num_bytes is None:
            return False
        missing[name] = num_bytes
        if num_bytes >= (self._storage.root / uuid / name).stat().st_size:
            del missing[name]
        return True

    def _put(self, uuid: str, name: str, offset: int, data: bytes) -> int | None:
        query = f"name={quote(name, safe='')}&offset={offset}&member={self._member}"
        digest = {"X-Paceline-Digest": xxhash.xxh3_128_hexdigest(data)}
        for number in range(_MAX_TRIES):
            try:
                reply = self._link.put(f"{self._path}/{uuid}/pieces?{query}", data, digest)
            except RefusedByMasterError as error:
                if error.code == "unknown_upload":
                    return None
                if error.code != "damaged_piece" or number == _MAX_TRIES - 1:
                    raise
                logger.warning("A piece of %s is sent again: %s", uuid, error)
                continue
            faults.reach("runner.checkpoint.piece_sent")
            return msgspec.json.decode(reply, type=PieceReply).num_bytes
        raise AssertionError
