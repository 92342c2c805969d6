"""Keeping a home: backups of it, and checks of what is in it."""

from paceline.master.upkeep._backup_snapshots import BackupError, Content, find_backup
from paceline.master.upkeep._check_findings import Finding
from paceline.master.upkeep._following_backups import follow_home
from paceline.master.upkeep._home_backup import Backup, BackupResult
from paceline.master.upkeep._home_check import CheckResult, check, fix
from paceline.master.upkeep._home_restore import (
    RestoreResult,
    restore,
    restore_copy,
)
from paceline.master.upkeep._recovery_writer import Recorder
from paceline.master.upkeep._restored_access import RestoredAccess

__all__ = [
    "Backup",
    "BackupError",
    "BackupResult",
    "CheckResult",
    "Content",
    "Finding",
    "Recorder",
    "RestoreResult",
    "RestoredAccess",
    "check",
    "find_backup",
    "fix",
    "follow_home",
    "restore",
    "restore_copy",
]
