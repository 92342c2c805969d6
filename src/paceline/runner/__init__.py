"""Attempts on a machine: their processes, what they report, and the runner of a node."""

from paceline.runner._attempt_directory import (
    NEWEST_NAME,
    AttemptDirectory,
    newest_attempt,
    note_attempt,
)
from paceline.runner._attempt_processes import AttemptProcesses
from paceline.runner._code_archive import (
    ArchiveLimits,
    ArchiveTooLargeError,
    check_archive,
    members,
    open_archive,
)
from paceline.runner._secret_file import FILE_NAME as SECRET_FILE_NAME
from paceline.runner._secret_file import SecretFileError, read_secret_file
from paceline.runner._start_errors import UnusableConfigError, is_shortage, judge_start
from paceline.runner._uv_environment import LOCK_NAME, missing_lock, sync_environment

__all__ = [
    "LOCK_NAME",
    "NEWEST_NAME",
    "SECRET_FILE_NAME",
    "ArchiveLimits",
    "ArchiveTooLargeError",
    "AttemptDirectory",
    "AttemptProcesses",
    "SecretFileError",
    "UnusableConfigError",
    "check_archive",
    "is_shortage",
    "judge_start",
    "members",
    "missing_lock",
    "newest_attempt",
    "note_attempt",
    "open_archive",
    "read_secret_file",
    "sync_environment",
]
