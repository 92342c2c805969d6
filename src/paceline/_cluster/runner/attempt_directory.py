"""Directory of an attempt: files from the master for the runner, and the runner's own files."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline._base.files import (
    NotRegularFileError,
    open_private,
    open_regular_below,
    opened_directory,
    read_limited,
    read_regular,
    regular_opener,
    write_atomically,
)
from paceline._base.journal_records import check_seal, seal
from paceline._base.run_directory import RunDirectory, RunInfo
from paceline._cluster.messages.runner_messages import AttemptEnd, AttemptSpec, StorageMark

FILE_NAME = "secrets.json"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, msgspec.DecodeError)


class SecretFileError(RuntimeError):
    """Raised when the file of secrets cannot be read."""


def read_secret_file(path: Path) -> dict[int, dict[str, str]]:
    """Return the secrets of each experiment; none if there is no file.

    Raises:
        SecretFileError: The file is damaged, or cannot be read.
    """
    try:
        stored: Any = json.loads(check_seal(read_regular(path)))
        return {int(number): dict(found) for number, found in stored["experiments"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, *_DAMAGE) as error:
        raise SecretFileError(
            f"The secrets in {str(path)!r} must be readable, but are not ({type(error).__name__})."
            " Hint: move the file away; experiments that need secrets have to be forked with them."
        ) from error


NEWEST_NAME = "newest"


def newest_attempt(root: Path) -> int:
    """Return the highest id of all attempts ever started below a directory, or 0."""
    try:
        return int(read_regular(root / NEWEST_NAME))
    except (FileNotFoundError, NotRegularFileError, ValueError):
        return 0


def note_attempt(root: Path, attempt_id: int) -> None:
    """Record the start of an attempt below `root`; the note outlives the attempt's directory."""
    if attempt_id > newest_attempt(root):
        write_atomically(root / NEWEST_NAME, str(attempt_id).encode())


class _Process(msgspec.Struct):
    group: int
    start_time: float


class AttemptDirectory:
    """``attempt.json``, ``run/``, ``context/``, ``output.jsonl``, ``exit.json`` and markers.

    The runner holds the lock for its whole life, so that a later master also finds the process at
    work. `started` is written before the entrypoint starts and never removed,
    so that an attempt is never run twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunDirectory(path / "run")
        self.context_path = path / "context"
        # Checkpoints on their way to the master.
        self.outgoing_path = path / "outgoing"
        self.output_path = path / "output.jsonl"
        self.runner_log_path = path / "runner.log"
        # Beside the directory, which is removed once the attempt has ended.
        self.kept_output_path = path.with_name(f"{path.name}.output.jsonl")
        self.set_aside_path = path.with_name(f"{path.name}.set_aside.jsonl")

    @classmethod
    def create(cls, path: Path, spec: AttemptSpec) -> "AttemptDirectory":
        """Make the directory and write the specification; the run directory is made apart."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = cls(path)
        write_atomically(path / "attempt.json", seal(msgspec.json.encode(spec)))
        # A runner that cannot make its lock ends before it can say why.
        (path / "runner.lock").touch(mode=0o600)
        return directory

    def read_spec(self) -> AttemptSpec:
        """Return the specification."""
        data = read_regular(self.path / "attempt.json")
        return msgspec.json.decode(check_seal(data), type=AttemptSpec)

    def read_end(self) -> AttemptEnd | None:
        """Return the end of the entrypoint, or None if no end was written."""
        try:
            data = read_regular(self.path / "exit.json")
        except FileNotFoundError:
            return None
        return msgspec.json.decode(check_seal(data), type=AttemptEnd)

    @property
    def has_end(self) -> bool:
        """Whether a runner has left word of how the entrypoint ended."""
        return (self.path / "exit.json").exists()

    def write_secrets(self, secrets: dict[str, str]) -> None:
        """Store secrets for a runner without access to the home."""
        write_atomically(self.path / FILE_NAME, seal(msgspec.json.encode(secrets)))

    def read_secrets(self) -> dict[str, str]:
        """Return the secrets stored for this runner."""
        data = read_regular(self.path / FILE_NAME)
        return msgspec.json.decode(check_seal(data), type=dict[str, str])

    def write_end(self, end: AttemptEnd) -> None:
        """Leave word of how the entrypoint ended."""
        write_atomically(self.path / "exit.json", seal(msgspec.json.encode(end)))

    @property
    def is_prepared(self) -> bool:
        """Whether the directory holds everything a runner needs."""
        return (self.path / "attempt.json").exists() and (self.run.path / "run.json").exists()

    @property
    def was_started(self) -> bool:
        """Whether an entrypoint was started here, ever.

        A power cut may leave its journal, which is forced to disk, and not the note.
        """
        return (self.path / "started").exists() or (self.run.path / "journal").exists()

    def mark_started(self) -> None:
        """Record the coming start of the entrypoint, and remove the secrets.

        Until then another runner may have to start it.
        """
        (self.path / "started").touch(mode=0o600)
        # A disk that refuses to remove files must not end attempts that have no secrets here.
        if (self.path / FILE_NAME).exists():
            (self.path / FILE_NAME).unlink()

    def keep_output(self) -> None:
        """Let the output outlive the directory.

        Raises:
            OSError: It cannot be moved.
        """
        if self.output_path.exists():
            self.output_path.replace(self.kept_output_path)

    def remove_kept(self) -> None:
        """Remove the output and set-aside records kept beside the directory.

        Raises:
            OSError: It cannot be removed.
        """
        for path in (self.kept_output_path, self.set_aside_path):
            path.unlink(missing_ok=True)

    def write_process(self, group: int, start_time: float) -> None:
        """Note the entrypoint's process group, for whoever cleans up after a dead runner."""
        noted = {"group": group, "start_time": start_time}
        write_atomically(self.path / "process.json", seal(msgspec.json.encode(noted)))

    def read_process(self) -> tuple[int, float] | None:
        """Return the entrypoint's process group and start time, or None before its start.

        Raises:
            msgspec.DecodeError: They are damaged.
        """
        try:
            data = read_regular(self.path / "process.json")
        except FileNotFoundError:
            return None
        noted = msgspec.json.decode(check_seal(data), type=_Process)
        return noted.group, noted.start_time

    @contextmanager
    def hold_lock(self) -> Iterator[bool]:
        """Hold the runner's lock; yields False if another runner holds the lock."""
        # Append mode: truncating on open would erase the process id of the present holder.
        with open_private(self.path / "runner.lock", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield True

    def give_sign(self) -> None:
        """Renew the lock holder's sign of life; ignores errors, for example of a full disk."""
        with suppress(OSError):
            os.utime(self.path / "runner.lock")

    def sign_of_life(self) -> int:
        """Return the lock file's time stamp, changed by each sign of life; 0 without a file."""
        try:
            return (self.path / "runner.lock").stat().st_mtime_ns
        except OSError:
            return 0

    def runner_pid(self) -> int | None:
        """Return the process id of the lock-holding runner, None if the lock is free."""
        lock_path = self.path / "runner.lock"
        try:
            with open(lock_path, opener=regular_opener) as file:
                try:
                    # A shared lock: two who ask at once must not take each other for the runner.
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    # The holder has written its number, or is about to.
                    text = file.read()
                    return int(text) if text else 0
                return None
        except (FileNotFoundError, NotADirectoryError, NotRegularFileError):
            return None


def place_checkpoints(
    spec: AttemptSpec, info: RunInfo, run: RunDirectory
) -> tuple[AttemptSpec, RunInfo]:
    """Return spec and info for this node, also if the master's directory is not shared.

    Without a mark, the storage is an object store, or the master cannot write to the directory. Of
    an attempt on several nodes, the place follows when all are there: see `place_on_each_node`.

    Args:
        spec: The master's description of the attempt.
        info: The facts for the processes of the attempt.
        run: The run directory of the attempt, which is not made yet.
    """
    if spec.storage_mark is None or _is_seen(spec.storage_mark):
        return spec, info
    spec = msgspec.structs.replace(spec, sends_checkpoints=True)
    if spec.num_members > 1:
        return spec, info
    return spec, msgspec.structs.replace(info, checkpoint_storage=str(run.checkpoints_path))


def place_on_each_node(run: RunDirectory) -> None:
    """Have each node of an attempt on several keep its own files of checkpoints."""
    info = run.read_info()
    place = str(run.checkpoints_path)
    run.write_info(msgspec.structs.replace(info, checkpoint_storage=place, storage_per_node=True))


def sends_checkpoints(spec: AttemptSpec, run: RunDirectory) -> bool:
    """Return whether the runner of an attempt sends its checkpoints to the master."""
    if spec.num_members > 1:
        return run.read_info().storage_per_node
    return spec.sends_checkpoints


def _is_seen(mark: StorageMark) -> bool:
    path = Path(mark.path)
    try:
        # Opening without following links: others may write to the directory.
        with (
            opened_directory(path.parent) as directory,
            open_regular_below(directory, path.name) as file,
        ):
            return read_limited(file, len(mark.text)) == mark.text.encode()
    except OSError:
        return False
