"""News of stored checkpoints: at once on the chief, later on the other ranks."""

from collections.abc import Mapping, Sequence

from paceline.core import DistributedContext
from paceline.pytorch._callbacks import PyTorchCallback


class StoredCheckpoints:
    """The checkpoints that a training has stored, as far as this rank knows.

    Args:
        distributed: Where the ranks meet.
        callbacks: Who is told on every rank.

    Attributes:
        uuids: Those of the present call of `fit`, oldest first.
        latest: The newest there is, also from before; empty without one.
    """

    def __init__(
        self, distributed: DistributedContext, callbacks: Mapping[str, PyTorchCallback]
    ) -> None:
        self.uuids: list[str] = []
        self.latest = ""
        self._distributed = distributed
        self._callbacks = callbacks
        self._num_announced = 0

    def begin(self) -> None:
        """Forget those of an earlier call of `fit`."""
        self.uuids, self._num_announced = [], 0

    def note(self, uuid: str) -> None:
        """Take note of one on the chief, which tells its callbacks at once if it is alone."""
        self.uuids.append(uuid)
        self.latest = uuid
        if self._distributed.size == 1:
            self._tell([uuid])

    def announce(self) -> None:
        """Tell every rank of what was stored since the last time; all must call it."""
        if self._distributed.size == 1:
            return
        news = self._distributed.broadcast(self.uuids[self._num_announced :])
        if self._distributed.rank:
            self.uuids += news
            self.latest = news[-1] if news else self.latest
        self._num_announced = len(self.uuids)
        self._tell(news)

    def _tell(self, uuids: Sequence[str]) -> None:
        for uuid in uuids:
            for callback in self._callbacks.values():
                callback.on_checkpoint_upload_end(uuid)
