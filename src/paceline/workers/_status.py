"""The file in which a worker says how it ended, before its process does.

An exit code alone is no verdict: with gloo a process that has done all its work can still abort
while the interpreter shuts down.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.workers._program import BEAT_ENDING

STATUS_VARIABLE = "PACELINE_WORKER_STATUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker wrote: its exit code, its exception if any, and when that was.

    `is_consequence` tells that the exception only answers the failure of another rank, `left_by`
    what the worker left by before its end, such as "sys.exit(3)".
    """

    code: int
    error: str | None
    time: float
    is_consequence: bool
    left_by: str | None


def status_path(directory: Path, rank: int) -> Path:
    """Return the status file of a rank."""
    return directory / f"rank-{rank}.json"


def beat_path(directory: Path, rank: int) -> Path:
    """Return the file that a rank touches as long as it lives, if it shows that."""
    return Path(f"{status_path(directory, rank)}{BEAT_ENDING}")


def read_status(path: Path) -> WorkerStatus | None:
    """Return what the worker wrote, or None if it did not get that far."""
    try:
        content = json.loads(path.read_bytes())
        return WorkerStatus(
            code=int(content["code"]),
            error=content["error"],
            time=float(content["time"]),
            is_consequence=bool(content.get("is_consequence")),
            left_by=content.get("left_by"),
        )
    except (OSError, ValueError, KeyError, TypeError):
        # Workers that are no Paceline workers write none, and one that was killed may not have.
        return None
