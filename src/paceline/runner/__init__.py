"""The per-node supervisor of an attempt: runs the entrypoint and ships what it says."""

from paceline.runner._directory import AttemptDirectory
from paceline.runner._shortage import is_shortage

__all__ = ["AttemptDirectory", "is_shortage"]
