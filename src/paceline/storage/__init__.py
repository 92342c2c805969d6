"""Checkpoint storage: immutable directories of files with a UUID, a manifest and metadata."""

from paceline._base.imports import show_public_errors
from paceline.storage._checkpoint_files import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    CheckpointWriteError,
    FileEntry,
    Manifest,
    Selector,
    StorageNotInstalledError,
)
from paceline.storage._checkpoint_storage import CheckpointStorage, storage_from
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._incoming_checkpoint import IncomingCheckpoint
from paceline.storage._object_storage import ObjectStorage, StoredObject

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
