"""Exceptions of checkpoint storages.

CheckpointError
├── CheckpointNotFoundError
├── CheckpointCorruptError
├── CheckpointVersionError
├── CheckpointWriteError (also an OSError)
└── StorageNotInstalledError (also a ValueError)
"""


class CheckpointError(Exception):
    """The base of all errors about checkpoints."""


class CheckpointNotFoundError(CheckpointError):
    """Raised when a storage holds no committed checkpoint with a UUID."""


class CheckpointCorruptError(CheckpointError):
    """Raised when files of a checkpoint are missing or altered; the message names each."""


class CheckpointVersionError(CheckpointError):
    """Raised when a checkpoint has another format version."""


class CheckpointWriteError(CheckpointError, OSError):
    """Raised when a checkpoint cannot be written, for example on a full disk.

    What was written of it is removed, and earlier checkpoints stay as they are.
    """


class StorageNotInstalledError(CheckpointError, ValueError):
    """Raised for a URL whose scheme neither Paceline nor an installed package offers."""
