"""The per-node supervisor of an attempt: runs the entrypoint and ships what it says."""

from paceline.runner._directory import AttemptDirectory

__all__ = ["AttemptDirectory"]
