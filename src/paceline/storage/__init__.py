"""Checkpoint storage: immutable directories of files with a UUID, a manifest and metadata."""

from paceline._atomic_files import sync_directory
from paceline.storage._checkpoint_directory import problem_of_file
from paceline.storage._checkpoint_names import is_of_other_trial, new_uuid, uuid_of_series
from paceline.storage._checkpoint_storage import CheckpointStorage, UuidList, check_uuid
from paceline.storage._deletion_meanwhile import restored
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._durable_files import (
    copy_file,
    copy_files,
    digest_file,
    digest_stream,
    sync_tree,
    write_durably,
)
from paceline.storage._errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    CheckpointWriteError,
    StorageNotInstalledError,
    failing_store_of,
)
from paceline.storage._incoming_checkpoint import IncomingCheckpoint, forget_incoming
from paceline.storage._manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    MAX_TEXT_BYTES,
    FileEntry,
    Manifest,
    Selector,
    ShardDone,
    decode_done,
    decode_manifest,
    done_name,
    glob_selector,
    origin_of,
)
from paceline.storage._object_storage_base import ObjectStorage
from paceline.storage._retention_rules import (
    Kept,
    RetentionRules,
    best_of,
    beyond_bytes,
    to_delete,
    wanted,
)
from paceline.storage._storage_from_setting import (
    checkpoint_at,
    directory_of_checkpoint,
    storage_from,
)
from paceline.storage._storage_registry import added_schemes, is_added_scheme, scheme_of
from paceline.storage._stored_object import StoredObject
from paceline.storage._upload import FileSender, UploadLimits

__all__ = [
    "MANIFEST_NAME",
    "MANIFEST_VERSION",
    "MAX_TEXT_BYTES",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointStorage",
    "CheckpointVersionError",
    "CheckpointWriteError",
    "DirectoryStorage",
    "FileEntry",
    "FileSender",
    "IncomingCheckpoint",
    "Kept",
    "Manifest",
    "ObjectStorage",
    "RetentionRules",
    "Selector",
    "ShardDone",
    "StorageNotInstalledError",
    "StoredObject",
    "UploadLimits",
    "UuidList",
    "added_schemes",
    "best_of",
    "beyond_bytes",
    "check_uuid",
    "checkpoint_at",
    "copy_file",
    "copy_files",
    "decode_done",
    "decode_manifest",
    "digest_file",
    "digest_stream",
    "directory_of_checkpoint",
    "done_name",
    "failing_store_of",
    "forget_incoming",
    "glob_selector",
    "is_added_scheme",
    "is_of_other_trial",
    "new_uuid",
    "origin_of",
    "problem_of_file",
    "restored",
    "scheme_of",
    "storage_from",
    "sync_directory",
    "sync_tree",
    "to_delete",
    "uuid_of_series",
    "wanted",
    "write_durably",
]
