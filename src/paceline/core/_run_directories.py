"""Directories of runs, and names of runs."""

import os
import re
import sys
import time
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A directory's name has no more than 255: a time before it, and perhaps a number behind.
_LONGEST_NAME = 230


def run_name(file: str | os.PathLike[str] | None = None) -> str:
    """Return the name of a run that was given none: the stem of a file, by default the script's."""
    script = Path(file if file is not None else sys.argv[0] if sys.argv else "")
    stem = script.parent.name if script.stem == "__main__" else script.stem
    if stem == "ipykernel_launcher":
        stem = "notebook"
    elif stem in ("", "-c"):
        stem = "notebook" if "ipykernel" in sys.modules else "python"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:_LONGEST_NAME].strip("-.") or "run"


def checked_run_name(name: str) -> str:
    """Return the name that a run was given.

    Raises:
        ValueError: It cannot be part of a file name, or is too long.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            "`name` must consist of letters, digits, dots, hyphens and underscores, and begin"
            f" with a letter or digit, but got {name!r}."
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"`name` must have {_LONGEST_NAME} characters at most, as it is part of a directory's"
            f" name, but {name[:20]!r}... has {len(name)}. Hint: shorten it; `hparams`"
            " can hold what the run is about."
        )
    return name


def make_run_directory(root: Path, name: str) -> Path:
    """Make the directory of a new run, which no other run has, and return its path."""
    root.mkdir(exist_ok=True)
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while True:
        path = root / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path


def local_directory(
    path: str | os.PathLike[str] | None, name: str, contents: str = "the journal of a run stays"
) -> Path | None:
    """Return a directory of this machine as an absolute path; None for None.

    Args:
        path: What the user gave.
        name: The name of the argument.
        contents: What is there in any case, for the error.

    Raises:
        ValueError: It is a URL.
    """
    if path is None:
        return None
    if "://" in os.fspath(path):
        raise ValueError(
            f"`{name}` must be a directory of this machine, where {contents}, but got"
            f" {os.fspath(path)!r}. Hint: `checkpoint_storage` takes URLs."
        )
    return Path(os.path.abspath(path))
