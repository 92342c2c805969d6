"""The per-node supervisor of an attempt: runs the entrypoint and ships what it says."""

from paceline.runner._directory import (
    NEWEST_NAME,
    AttemptDirectory,
    newest_attempt,
    note_attempt,
)
from paceline.runner._shortage import is_shortage

__all__ = ["NEWEST_NAME", "AttemptDirectory", "is_shortage", "newest_attempt", "note_attempt"]
