"""Fetching the packed code of an attempt, where the runner does not see the master's home."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from paceline.messages.attempts import MAX_PIECE_BYTES
from paceline.runner._master_link import MasterLink
from paceline.runner._repeated_get import RepeatedGet

_MAX_TRIES = 3


class DamagedCodeError(Exception):
    """Raised when code arrives with another digest, again and again."""


def fetch_code(
    link: MasterLink,
    digest: str,
    target: Path,
    is_wanted: Callable[[], bool],
    tell: Callable[[str], object],
) -> bool:
    """Fetch packed code from the master into a file; what arrived before a failure stays.

    Args:
        link: A connection to the master.
        digest: The SHA-256 of the code.
        target: The file.
        is_wanted: Asked before each piece; if it says no, fetching ends.
        tell: Gets each new reason why a piece does not arrive, which is asked for again.

    Returns:
        Whether it is there: False if it is not wanted any more.

    Raises:
        RefusedByMasterError: The master does not give it.
        DamagedCodeError: It has another digest.
        OSError: The disk is full.
    """
    fetch = RepeatedGet(link, "code", is_wanted, tell)
    for _ in range(_MAX_TRIES):
        found = _fetch_once(fetch, f"/contexts/{digest}", target)
        if found is None:
            return False
        if found == digest:
            return True
    raise DamagedCodeError(f"Code must arrive with the SHA-256 {digest}, but has {found}.")


def _fetch_once(fetch: RepeatedGet, path: str, target: Path) -> str | None:
    """Return the SHA-256 of what was fetched, None if it is not wanted any more."""
    hasher, size = hashlib.sha256(), 0
    with target.open("wb") as file:
        while True:
            data = fetch.get_piece(path, size, MAX_PIECE_BYTES)
            if data is None:
                return None
            file.write(data)
            hasher.update(data)
            size += len(data)
            if len(data) < MAX_PIECE_BYTES:
                return hasher.hexdigest()
