"""Objects that mark the checkpoints of a store which are not whole, for the sweep of leftovers."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol
from uuid import uuid4

from paceline.storage._errors import CheckpointError
from paceline.storage._stored_object import StoredObject
from paceline.storage._upload import UploadLimits

# Before the UUIDs of checkpoints that are not whole. Each is the key of an object with the seconds
# that may pass without a sign of the writer; it is empty if an earlier version wrote it.
_OPEN = ".open/"
# Before the keys of objects that are put to learn the time of the store.
_CLOCK = ".clock/"


class _Objects(Protocol):
    """A store of objects."""

    def _put_data(self, key: str, data: bytes) -> None: ...
    def _read_whole(self, key: str) -> bytes | None: ...
    def objects(self, prefix: str) -> Sequence[StoredObject]: ...
    def remove(self, keys: Sequence[str]) -> None: ...


class OpenMarkers:
    """The marks of the checkpoints that were begun, or whose deletion was, and are not finished.

    Others may keep UUIDs in the same store: only what is marked is a leftover.

    Args:
        store: The store.
    """

    def __init__(self, store: _Objects) -> None:
        self._store = store
        self._now: float | None = None

    def add(self, uuid: str) -> None:
        """Mark a checkpoint, before its first file is sent or removed."""
        # Stores may tell for a file when its first part came.
        limit_s = 2 * UploadLimits.from_environment().file_s
        self._store._put_data(self.key(uuid), f"{limit_s:g}".encode())

    def key(self, uuid: str) -> str:
        """Return the key of a checkpoint's mark."""
        return f"{_OPEN}{uuid}"

    def all(self) -> dict[str, StoredObject]:
        """Return the marks by UUID, sorted."""
        return {each.key.removeprefix(_OPEN): each for each in sorted(self._store.objects(_OPEN))}

    def is_left(
        self, mark: StoredObject, stored: Sequence[StoredObject], older_than_s: float
    ) -> bool:
        """Tell whether nobody writes a checkpoint any more, so that it may be removed.

        Args:
            mark: The mark of the checkpoint.
            stored: Its objects.
            older_than_s: How many seconds must have passed since the last write; if above 0, at
                least as many as the mark says.
        """
        if older_than_s <= 0:
            return True
        changed = max(each.changed for each in (mark, *stored))
        return self._time_there() - changed >= max(older_than_s, self._silent_s(mark.key))

    def _silent_s(self, key: str) -> float:
        try:
            return float(self._store._read_whole(key) or 0)
        except ValueError:
            return 0.0  # a file of somebody else

    def _time_there(self) -> float:
        """Return the time by the clock of the store, which tells when objects have changed."""
        if self._now is None:
            key = f"{_CLOCK}{uuid4()}"
            self._store._put_data(key, b"")
            # With those that killed sweeps have left.
            there = {each.key: each for each in self._store.objects(_CLOCK)}
            with suppress(CheckpointError):
                self._store.remove([*there])
            if key not in there:
                raise CheckpointError(
                    f"A store must list what was put, but there is no {key!r}: the age of what is"
                    " left there cannot be told."
                )
            self._now = there[key].changed
        return self._now
