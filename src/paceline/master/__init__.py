"""The server: experiments, search, scheduling, metrics, checkpoints and logs."""

from paceline.master._home_directory import HomeInUseError, HomeUnusableError
from paceline.master._lost_database import LostDatabaseError
from paceline.master._server import PortInUseError, serve
from paceline.master.store import DatabaseVersionError
from paceline.runner import SecretFileError

__all__ = [
    "DatabaseVersionError",
    "HomeInUseError",
    "HomeUnusableError",
    "LostDatabaseError",
    "PortInUseError",
    "SecretFileError",
    "serve",
]
