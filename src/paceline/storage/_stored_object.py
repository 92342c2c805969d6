"""What a store of objects tells of one of them."""

from typing import NamedTuple


class StoredObject(NamedTuple):
    """One object: its key, its size in bytes, and its last change in seconds since the epoch.

    The size is that of what is read. Times are by the clock of the store.
    The mark is another one for another content, such as an ETag; empty where the store has none.
    """

    key: str
    size: int
    changed: float
    mark: str = ""
