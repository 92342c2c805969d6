"""Shipping the parts of checkpoints that ranks of this node have stored, beside rank 0's node."""

import logging
import time
from itertools import islice

import msgspec

from paceline import faults
from paceline.messages.attempts import CheckpointNeeds, ShardOffer
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._master_link import MasterBackoff, MasterLink, encode
from paceline.runner._send_pieces import PieceSender
from paceline.runner._shipping_loop import ShippingLoop
from paceline.storage import MANIFEST_NAME, DirectoryStorage

logger = logging.getLogger(__name__)

# As many as the master takes at once.
_MAX_OPEN = 4
_PAUSE_S = 0.02

faults.register("runner.shard.arrived")


class ShardShipper(ShippingLoop):
    """Send the files of finished shards, the oldest checkpoint first, and delete what was stored.

    The master stores a checkpoint once the runner of rank 0's node has offered it and the files of
    all nodes are there. Until then they stay here, as the master may find one damaged. Nothing but
    the files themselves says how far it got.

    Args:
        directory: The attempt's directory.
        path: The attempt's place in the API.
        link: A connection of its own.
        member: Which of the attempt's nodes this is.
    """

    def __init__(
        self, directory: AttemptDirectory, path: str, link: MasterLink, member: int
    ) -> None:
        super().__init__("shards")
        self._storage = DirectoryStorage(directory.run.checkpoints_path)
        self._path = f"{path}/checkpoints"
        self._member = member
        self._link = link
        self._sender = PieceSender(link, self._path, self._storage, member)
        # What the master lacks of the checkpoint that is being sent.
        self._sending: tuple[str, dict[str, int]] | None = None
        # The ranks whose files have arrived, by checkpoint, and when to ask for news of it.
        self._arrived: dict[str, set[int]] = {}
        self._ask_at = 0.0
        self._pauses = MasterBackoff(0.2, 2.0)

    def forget_positions(self) -> None:
        """Ask the master anew what it has."""
        self._sending = None
        self._arrived.clear()

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def ship_once(self) -> bool:
        """Send one piece, or one request; False when there was nothing."""
        if self._sending is not None:
            uuid, missing = self._sending
            if not missing or not self._sender.send(uuid, missing):
                self._sending = None  # the next offer says whether that was all
            return True
        shards = dict(islice(self._shards().items(), _MAX_OPEN))
        for uuid, texts in shards.items():
            if self._arrived.get(uuid) != texts.keys():
                self._offer(uuid, texts, [*shards])
                return True
        if shards and time.monotonic() > self._ask_at:
            self._ask_at = time.monotonic() + self._pauses.next_s()
            for uuid, texts in shards.items():
                if self._offer(uuid, texts, [*shards]):
                    return True
        return False

    def ship_rest(self) -> None:
        """Send everything that is there; raises like `ship_once`."""
        while self.ship_once() or self._arrived.keys() != self._shards().keys():
            # The oldest ones must be stored before the master takes more.
            time.sleep(_PAUSE_S)

    def _offer(self, uuid: str, texts: dict[int, str], known: list[str]) -> bool:
        """Tell the master what is here of a checkpoint; True if it lacks some of that."""
        offer = encode(ShardOffer(shards=texts))
        reply = self._link.post(f"{self._path}/{uuid}/shards?member={self._member}", offer)
        needs = msgspec.json.decode(reply, type=CheckpointNeeds)
        if needs.is_alone:
            logger.error("Checkpoint %s is given up: rank 0's node has ended without it.", uuid)
            self._storage.discard(uuid)
            self._arrived.pop(uuid, None)
            return False
        if needs.is_stored:
            # Checkpoints are committed in their order: the ones before it never will be.
            for each in known[: known.index(uuid) + 1]:
                self._storage.discard(each)
                self._arrived.pop(each, None)
            self._pauses.reset()
        elif needs.missing:
            self._arrived.pop(uuid, None)
            self._sending = (uuid, dict(needs.missing))
        elif self._arrived.get(uuid) != texts.keys():
            self._arrived[uuid] = set(texts)
            faults.reach("runner.shard.arrived")
        return bool(needs.missing)

    def _shards(self) -> dict[str, dict[int, str]]:
        """Return the done files of checkpoints that are not committed here, the oldest first."""
        root = self._storage.root
        found = []
        for path in root.iterdir() if root.is_dir() else ():
            done = [one for one in path.glob("rank-*.done") if one.name != "rank-0.done"]
            if done and not (path / MANIFEST_NAME).exists():
                texts = {int(one.stem.removeprefix("rank-")): one.read_text() for one in done}
                found.append((min(one.stat().st_mtime_ns for one in done), path.name, texts))
        return {uuid: dict(sorted(texts.items())) for _, uuid, texts in sorted(found)}
