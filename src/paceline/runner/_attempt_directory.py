"""The directory of one attempt: what the master hands to a runner, and what it finds there."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline._private_files import open_private
from paceline._regular_files import NotRegularFileError, read_regular, regular_opener
from paceline._sealed_json import check_seal, seal
from paceline.journal import RunDirectory, write_atomically
from paceline.messages.attempts import AttemptEnd, AttemptSpec
from paceline.runner._secret_file import FILE_NAME

NEWEST_NAME = "newest"


def newest_attempt(root: Path) -> int:
    """Return the highest id of all attempts that were ever started below a directory, or 0."""
    try:
        return int(read_regular(root / NEWEST_NAME))
    except (FileNotFoundError, NotRegularFileError, ValueError):
        return 0


def note_attempt(root: Path, attempt_id: int) -> None:
    """Note that an attempt is started: this outlives its directory."""
    if attempt_id > newest_attempt(root):
        write_atomically(root / NEWEST_NAME, str(attempt_id).encode())


class _Process(msgspec.Struct):
    group: int
    start_time: float


class AttemptDirectory:
    """``attempt.json``, ``run/``, ``context/``, ``output.jsonl``, ``exit.json`` and markers.

    The lock is held by the runner for as long as it lives: it says who is at work, also to a
    master that started later. `started` is written before the entrypoint starts and never removed,
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
        """Return how the entrypoint ended, or None if that is not known."""
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
        """Hand secrets to a runner that does not see the home."""
        write_atomically(self.path / FILE_NAME, seal(msgspec.json.encode(secrets)))

    def read_secrets(self) -> dict[str, str]:
        """Return the secrets that were handed to this runner."""
        data = read_regular(self.path / FILE_NAME)
        return msgspec.json.decode(check_seal(data), type=dict[str, str])

    def write_end(self, end: AttemptEnd) -> None:
        """Leave word of how the entrypoint ended."""
        write_atomically(self.path / "exit.json", seal(msgspec.json.encode(end)))

    @property
    def is_prepared(self) -> bool:
        """Whether everything that a runner needs is there."""
        return (self.path / "attempt.json").exists() and (self.run.path / "run.json").exists()

    @property
    def was_started(self) -> bool:
        """Whether an entrypoint was started here, ever.

        A power cut may leave its journal, which is forced to disk, and not the note.
        """
        return (self.path / "started").exists() or (self.run.path / "journal").exists()

    def mark_started(self) -> None:
        """Note that the entrypoint is about to start, and remove the secrets.

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
        """Remove what outlived the directory.

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
        """Return the entrypoint's process group and start time, if one was started.

        Raises:
            msgspec.DecodeError: They are damaged.
        """
        try:
            data = read_regular(self.path / "process.json")
        except FileNotFoundError:
            return None
        noted = msgspec.json.decode(check_seal(data), type=_Process | tuple[int, float])
        # An earlier version wrote a pair.
        return (noted.group, noted.start_time) if isinstance(noted, _Process) else noted

    @contextmanager
    def hold_lock(self) -> Iterator[bool]:
        """Hold the runner's lock; yields False if another runner has it."""
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
        """Give a sign of life of the runner that holds the lock; a full disk is no error."""
        with suppress(OSError):
            os.utime(self.path / "runner.lock")

    def sign_of_life(self) -> int:
        """Return what changes when the runner gives a sign of life."""
        try:
            return (self.path / "runner.lock").stat().st_mtime_ns
        except OSError:
            return 0

    def runner_pid(self) -> int | None:
        """Return the process id of the runner that holds the lock, None if nobody does."""
        lock_path = self.path / "runner.lock"
        try:
            with open(lock_path, opener=regular_opener) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    text = file.read()
                    return int(text) if text else 0
                return None
        except (FileNotFoundError, NotADirectoryError, NotRegularFileError):
            return None
