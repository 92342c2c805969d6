"""Checkpoint storage: immutable directories of files with a UUID, a manifest and metadata."""

from paceline._base.imports import show_public_errors
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    CheckpointWriteError,
    StorageNotInstalledError,
)
from paceline.storage._checkpoint_files import FileEntry, Manifest, Selector
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._incoming_checkpoint import IncomingCheckpoint
from paceline.storage._object_storage_base import ObjectStorage, StoredObject
from paceline.storage._storage_from_url import storage_from

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointStorage",
    "CheckpointVersionError",
    "CheckpointWriteError",
    "DirectoryStorage",
    "FileEntry",
    "IncomingCheckpoint",
    "Manifest",
    "ObjectStorage",
    "Selector",
    "StorageNotInstalledError",
    "StoredObject",
    "storage_from",
]

show_public_errors(__name__, globals())
