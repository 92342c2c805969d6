"""Keeping a home: backups of it, and checks of what is in it."""

from paceline.master.upkeep._backup import Backup, BackupResult
from paceline.master.upkeep._check import CheckResult, check, fix
from paceline.master.upkeep._findings import Finding
from paceline.master.upkeep._follow import follow_home
from paceline.master.upkeep._recorder import Recorder
from paceline.master.upkeep._restore import RestoreResult, find_backup, restore
from paceline.master.upkeep._snapshots import BackupError, Content

__all__ = [
    "Backup",
    "BackupError",
    "BackupResult",
    "CheckResult",
    "Content",
    "Finding",
    "Recorder",
    "RestoreResult",
    "check",
    "find_backup",
    "fix",
    "follow_home",
    "restore",
]
