"""The checkpoints of ranks on several nodes, each of which has a disk of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline._atomic_files import write_atomically
from paceline.core._distributed_context import DistributedContext
from paceline.storage import DirectoryStorage, ShardDone, decode_done, done_name


class NodeStorage(DirectoryStorage):
    """A directory of one node, for checkpoints that ranks of several nodes store together.

    Each rank stores its files on its own node. The done files of other nodes' ranks reach the chief
    through the store of the ranks. So the chief commits as usual, with a manifest that names the
    files of all nodes. The runners of the nodes send the files to the master.

    Args:
        root: The directory on this node.
        distributed: Where the ranks meet.
    """

    def __init__(self, root: Path, distributed: DistributedContext) -> None:
        super().__init__(root)
        self._distributed = distributed

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a directory of its own; afterwards the chief is told what is in it."""
        with super().store_shard(uuid, rank) as path:
            yield path
        if self._distributed.cross_rank:
            text = (self.root / uuid / done_name(rank)).read_bytes()
            self._distributed.put(f"{uuid}/{rank}", text)

    def _read_done(self, uuid: str, rank: int) -> ShardDone | None:
        done = super()._read_done(uuid, rank)
        if done is not None or self._distributed.rank:
            return done
        text = self._distributed.take(f"{uuid}/{rank}")
        if text is None:
            return None
        done = decode_done(text, uuid, rank)
        # The runner sends it with the manifest.
        write_atomically(self.root / uuid / done_name(rank), text)
        return done
