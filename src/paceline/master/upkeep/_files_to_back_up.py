"""Which files of a home belong to a backup."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from paceline.master.store import KnownFiles

DATABASE = "master.sqlite"
CHECKPOINTS = "checkpoints"

# Nobody finds them in a backup: who gets hold of one must not get into a master by it.
_SECRET = re.compile(r"secret|token|password|key", re.IGNORECASE)
# What belongs to a running master, can be made again, or is a copy itself. The newest attempt is
# noted again with the next one, and a restored database writes records of its own.
_OWN = re.compile(
    r"master\.(sqlite.*|json|lock|log.*|version-.*)|set_aside(/.*)?|restoring|records/.*"
    r"|attempts/newest|logs/.*\.index"
)
# Of a running attempt: whether it was started, what it wrote, and how it ended.
_OF_ATTEMPT = re.compile(r"started|exit\.json|output\.jsonl|run/.*")
# Files that grow; the line that is just being written is not whole.
_GROWS = re.compile(r".*\.(jsonl|journal)")


@dataclass(slots=True)
class BackupSelection:
    """Files that belong to a backup, and what is left out, in words."""

    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def select_files(
    home: Path, known: KnownFiles, attempts: set[int], *, checkpoints: bool
) -> BackupSelection:
    """Return the files of a home that go with a copy of its database.

    Args:
        home: The home; a master may be at work in it.
        known: The files that the copy knows. Others are newer than it.
        attempts: The attempts that have not ended by the copy.
        checkpoints: Whether to take the home's checkpoints.
    """
    selection = BackupSelection()
    for name in _files_below(home):
        top = name.partition("/")[0]
        if top == CHECKPOINTS:
            continue
        # A checkpoint or a script may have such names below; secrets lie at the top.
        if "/" not in name and _SECRET.search(name):
            selection.left_out.append(f"{name} (a secret)")
        elif not _OWN.fullmatch(name) and _belongs(name, known, attempts):
            selection.names.append(name)
    stored = list(_checkpoint_files(home)) if (home / CHECKPOINTS).is_dir() else []
    if checkpoints:
        selection.names += stored
    elif stored:
        number = len({name.split("/")[1] for name in stored})
        selection.left_out.append(f"{number} checkpoint{'s' * (number > 1)} (see `--checkpoints`)")
    return selection


def grows(name: str) -> bool:
    """Tell whether lines are added to a file."""
    return _GROWS.fullmatch(name) is not None


def _files_below(home: Path) -> Iterator[str]:
    """Yield the names of all files that are there; those that vanish meanwhile are left out."""
    waiting = [home]
    while waiting:
        directory = waiting.pop()
        try:
            entries = sorted(directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            name = entry.relative_to(home).as_posix()
            if entry.name.startswith(".") or entry.is_symlink():
                continue  # being written, or not the home's own
            if entry.is_dir():
                if name not in (CHECKPOINTS, "set_aside"):
                    waiting.append(entry)
            elif entry.is_file():
                yield name


def _belongs(name: str, known: KnownFiles, attempts: set[int]) -> bool:
    path = PurePosixPath(name)
    top = path.parts[0]
    if top == "contexts" and known.contexts is not None:
        return path.name.split(".")[0] in known.contexts
    if top == "logs":
        trial = path.parts[1].removeprefix("trial-")
        return not trial.isdecimal() or int(trial) <= known.newest_trial
    if top != "attempts" or len(path.parts) < 2:
        return True
    number = path.parts[1].split(".")[0]
    if not number.isdecimal():
        return True
    if len(path.parts) == 2:
        return int(number) <= known.newest_attempt
    inner = "/".join(path.parts[2:])
    return int(number) in attempts and _OF_ATTEMPT.fullmatch(inner) is not None


def _checkpoint_files(home: Path) -> Iterator[str]:
    """Yield the files of whole checkpoints."""
    for directory in sorted((home / CHECKPOINTS).iterdir()):
        if not directory.name.startswith(".") and (directory / "manifest.json").is_file():
            for path in sorted(directory.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(home).as_posix()
