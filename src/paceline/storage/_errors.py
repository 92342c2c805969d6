"""Exceptions of checkpoint storages.

CheckpointError
├── CheckpointNotFoundError
├── CheckpointCorruptError
├── CheckpointVersionError
├── CheckpointWriteError (also an OSError)
└── StorageNotInstalledError (also a ValueError)
"""


class CheckpointError(Exception):
    """The base of all errors about checkpoints.

    Attributes:
        failing_store: The URL of the store if it does not answer, which may pass; else None.
    """

    failing_store: str | None = None


class CheckpointNotFoundError(CheckpointError):
    """Raised when a storage holds no committed checkpoint with a UUID."""


class CheckpointCorruptError(CheckpointError):
    """Raised when files of a checkpoint are missing or altered; the message names each."""


class CheckpointMismatchError(ValueError):
    """Raised when a checkpoint does not fit the training that would resume from it."""


class CheckpointVersionError(CheckpointError):
    """Raised when a checkpoint has another format version."""


class CheckpointWriteError(CheckpointError, OSError):
    """Raised when a checkpoint cannot be written, for example on a full disk.

    What was written of it is removed, and earlier checkpoints stay as they are.
    """


class StorageNotInstalledError(CheckpointError, ValueError):
    """Raised for a URL whose scheme neither Paceline nor an installed package offers."""


def failing_store_of(error: BaseException | None) -> str | None:
    """Return the URL of the store that an error comes from because it does not answer, or None."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, CheckpointError) and error.failing_store is not None:
            return error.failing_store
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
