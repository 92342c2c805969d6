"""The run directory: what an attempt's processes, its runner and the command line share."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from paceline._atomic_files import write_atomically
from paceline._regular_files import read_regular, regular_opener
from paceline._sealed_json import check_seal, seal
from paceline.journal._journal_reader import JournalReader
from paceline.journal._run_info import RUN_FORMAT_VERSION, Control, RunInfo

RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"
# What ended workers that a launcher has started again, as JSON; see `AttemptStarted`.
RESTART_CAUSES_VARIABLE = "PACELINE_RESTART_CAUSES"
# Where the launchers of an attempt on several nodes meet.
MEETING_PORT_VARIABLE = "PACELINE_MEETING_PORT"
_LAUNCH_ERROR_FILE = "launch_error.txt"
# A run on another machine that gives no sign of life for longer is lost.
HEARTBEAT_LIMIT_S = 60.0
# A run's first file that is so much younger than the run was copied without its time.
_COPIED_S = 60.0

_LOCK_TRIES = 6
_LOCK_PAUSE_S = 0.02
# Ends the note of a checkpoint that another process commits.
_PART = ".part"
_JOURNAL_NAME = re.compile(r"^a(\d+)\.g(\d+)\.r(\d+)$")


class RunVersionError(ValueError):
    """Raised when a run directory has another format version."""


class NotARunDirectoryError(ValueError):
    """Raised when a path holds no run directory."""


class JournalKey(msgspec.Struct, frozen=True, order=True):
    """Which process of a run wrote a journal."""

    attempt: int
    generation: int
    rank: int

    @property
    def directory_name(self) -> str:
        """The name of the journal's directory."""
        return f"a{self.attempt}.g{self.generation}.r{self.rank}"


class RunDirectory:
    """A run directory on node-local disk, mode 0700.

    Layout: ``run.json``, ``control.json``, ``journal/a<attempt>.g<generation>.r<rank>/``,
    ``logs/``, ``begun_checkpoints/`` and, for runs without a master, ``checkpoints/``,
    ``heartbeat`` and, of attempts that were killed, ``heartbeat-<attempt>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, info: RunInfo) -> "RunDirectory":
        """Make the directory and write `run.json`.

        Raises:
            FileExistsError: The directory is a run directory already.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        run = cls(path)
        if run._info_path.exists():
            raise FileExistsError(f"{str(path)!r} is a run directory already.")
        # Made here, so that no process has to make it on a disk that is full by then.
        run._lock_path.touch(mode=0o600)
        run.write_info(info)
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Return the run directory at `path` after checking its version.

        Raises:
            NotARunDirectoryError: There is none.
            RunVersionError: It has another format version.
        """
        run = cls(path)
        run.read_info()
        return run

    def read_info(self) -> RunInfo:
        """Read `run.json`.

        Raises:
            NotARunDirectoryError: There is none, or it is no such file.
            RunVersionError: It has another format version.
        """
        try:
            data = read_regular(self._info_path)
            version = msgspec.json.decode(data)["version"]
            if version == RUN_FORMAT_VERSION:
                check_seal(data)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise NotARunDirectoryError(
                f"{str(self.path)!r} must be a Paceline run directory, but its run.json cannot be"
                f" read ({error})."
            ) from error
        if version != RUN_FORMAT_VERSION:
            raise RunVersionError(
                f"The run directory {str(self.path)!r} must have format version"
                f" {RUN_FORMAT_VERSION}, but has {version!r}. Hint: use the Paceline version that"
                " wrote it."
            )
        return msgspec.json.decode(data, type=RunInfo)

    def write_info(self, info: RunInfo) -> None:
        """Write `run.json`, before the processes start."""
        text = msgspec.json.format(msgspec.json.encode(info), indent=1)
        write_atomically(self._info_path, seal(text))

    @property
    def _info_path(self) -> Path:
        return self.path / "run.json"

    @property
    def _lock_path(self) -> Path:
        return self.path / "attempt.lock"

    @property
    def _ranks_lock_path(self) -> Path:
        return self.path / "ranks.lock"

    @property
    def control_path(self) -> Path:
        """The file through which the runner speaks to the processes."""
        return self.path / "control.json"

    @property
    def checkpoints_path(self) -> Path:
        """Where a run without a master keeps its checkpoints."""
        return self.path / "checkpoints"

    @property
    def _begun_path(self) -> Path:
        return self.path / "begun_checkpoints"

    @property
    def logs_path(self) -> Path:
        """Where launchers keep one output file per rank."""
        return self.path / "logs"

    def write_control(self, control: Control) -> None:
        """Replace the control file."""
        write_atomically(self.control_path, seal(msgspec.json.encode(control)))

    def read_control(self) -> Control:
        """Return the control file's content, or the defaults if there is none yet.

        Raises:
            msgspec.DecodeError: It is damaged.
        """
        try:
            return msgspec.json.decode(check_seal(read_regular(self.control_path)), type=Control)
        except FileNotFoundError:
            return Control()

    def note_checkpoint(self, uuid: str, storage: str, *, is_part: bool = False) -> None:
        """Note that a checkpoint is being written, for whoever cleans up after a killed process.

        A full disk is no error: then nobody knows of it.

        Args:
            uuid: The checkpoint.
            storage: The URL of its storage.
            is_part: Whether another process commits it, which may have another run directory.
        """
        with suppress(OSError):
            self._begun_path.mkdir(mode=0o700, exist_ok=True)
            (self._begun_path / f"{uuid}{_PART * is_part}").write_text(storage)

    def forget_checkpoint(self, uuid: str) -> None:
        """Take the notes of a checkpoint back, once it is committed or removed."""
        for suffix in ("", _PART):
            with suppress(OSError):
                (self._begun_path / f"{uuid}{suffix}").unlink()

    def begun_checkpoints(self, *, is_part: bool = False) -> dict[str, str]:
        """Return the UUIDs of the checkpoints that are being written, with their storages.

        Args:
            is_part: Return those that other processes commit, in place of those that the processes
                of this run directory do.
        """
        if not self._begun_path.is_dir():
            return {}
        return {
            path.name.removesuffix(_PART): read_regular(path).decode()
            for path in sorted(self._begun_path.iterdir())
            if path.name.endswith(_PART) == is_part
        }

    def journal_path(self, key: JournalKey) -> Path:
        """Return the directory of one journal."""
        return self.path / "journal" / key.directory_name

    def write_launch_error(self, text: str) -> None:
        """Write why the workers have ended, those of all nodes, for the runner of this one."""
        write_atomically(self.path / _LAUNCH_ERROR_FILE, text.encode(errors="replace"))

    def read_launch_error(self) -> str | None:
        """Return why the workers have ended; None if no launcher has told it."""
        try:
            text = read_regular(self.path / _LAUNCH_ERROR_FILE).decode(errors="replace")
            return text.strip() or None
        except OSError:
            return None

    def journal_keys(self) -> list[JournalKey]:
        """Return the keys of all journals, ordered by attempt, generation and rank."""
        root = self.path / "journal"
        if not root.is_dir():
            return []
        matches = [_JOURNAL_NAME.match(name) for name in os.listdir(root)]
        return sorted(JournalKey(*map(int, match.groups())) for match in matches if match)

    def reader(self, key: JournalKey, *, after: int = -1) -> JournalReader:
        """Return a reader of one journal that starts after a sequence number."""
        return JournalReader(self.journal_path(key), after=after)

    @contextmanager
    def hold_attempt_lock(self) -> Iterator[bool]:
        """Hold the lock that marks the run as alive; yields False if another process has it.

        The operating system releases it when the process dies, however it dies.
        """
        with open(self._lock_path, "w", opener=regular_opener) as file:
            is_ours = _try_lock(file, fcntl.LOCK_EX)
            _held.add(file)
            try:
                yield is_ours
            finally:
                _held.discard(file)

    @contextmanager
    def hold_rank_lock(self) -> Iterator[None]:
        """Hold, together with other ranks, a lock that marks the run as alive without its chief.

        Without it, what ranks report after their chief was killed would look like that of a run
        that has ended.
        """
        try:
            # It is there before the processes start, and nobody replaces it while they run.
            file = open(self._info_path, opener=regular_opener)  # noqa: SIM115 - closed below
        except OSError:
            # A machine that does not see the directory: another check names it.
            yield
            return
        with file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
            _held.add(file)
            try:
                yield
            finally:
                _held.discard(file)

    def beat(self) -> None:
        """Give a sign of life of the process that holds the attempt lock.

        Raises:
            OSError: It cannot be written.
        """
        host = os.uname().nodename
        if self._beating_host() == host:
            os.utime(self._heartbeat_path)
        else:
            write_atomically(self._heartbeat_path, host.encode())

    def end_heartbeat(self) -> None:
        """Say that no further sign of life will come."""
        with suppress(OSError):
            self._heartbeat_path.unlink()

    def keep_last_beat(self, attempt: int) -> None:
        """Keep the time of the last sign of life of an attempt, before the next one gives some.

        Raises:
            OSError: It cannot be written.
        """
        beat = self._present_beat()
        if beat is not None:
            write_atomically(self._kept_beat_path(attempt), repr(beat).encode())

    def last_beat(self, attempt: int) -> float | None:
        """Return when an attempt gave its last sign of life, in seconds since the epoch.

        None if it has ended in order, or in its first second. For the newest attempt it is a time
        of a file, and also None if the directory was copied without the times.
        """
        try:
            return float(read_regular(self._kept_beat_path(attempt)))
        except FileNotFoundError:
            return self._present_beat()
        except (OSError, ValueError):
            return None

    def _present_beat(self) -> float | None:
        try:
            written_s = self._info_path.stat().st_mtime
            beat = self._heartbeat_path.stat().st_mtime
            is_copy = written_s - self.read_info().created > _COPIED_S
        except (OSError, ValueError):
            return None
        return None if is_copy else beat

    def _kept_beat_path(self, attempt: int) -> Path:
        return self.path / f"heartbeat-{attempt}"

    @property
    def _heartbeat_path(self) -> Path:
        return self.path / "heartbeat"

    def _beating_host(self) -> str | None:
        try:
            return read_regular(self._heartbeat_path).decode()
        except (OSError, ValueError):
            return None

    def is_beating_elsewhere(self) -> bool | None:
        """Tell whether the run's last sign of life is recent, if it came from another machine.

        None if it came from this machine, or if there is none. Clocks of machines must agree within
        some seconds.
        """
        host = self._beating_host()
        if host is None or host == os.uname().nodename:
            return None
        try:
            age_s = time.time() - self._heartbeat_path.stat().st_mtime
        except FileNotFoundError:
            return None
        return age_s < HEARTBEAT_LIMIT_S

    def is_alive(self) -> bool:
        """Tell whether a process is at work on the run.

        On this machine, the chief holds the attempt lock, and other ranks hold a lock of theirs. A
        lock that another machine holds may not be seen, or may outlive that machine: there, signs
        of life count.
        """
        is_beating = self.is_beating_elsewhere()
        if is_beating is not None:
            return is_beating
        if _is_locked(self._lock_path, fcntl.LOCK_SH):
            return True
        # Ranks share a lock, those of earlier versions the last one.
        return any(
            _is_locked(path, fcntl.LOCK_EX) for path in (self._info_path, self._ranks_lock_path)
        )


# A forked child, such as a data loader's worker, would hold the lock beyond its parent's death.
_held: set[IO[str]] = set()


def _drop_held() -> None:
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_drop_held)


def _is_locked(path: Path, kind: int) -> bool:
    try:
        with open(path, opener=regular_opener) as file:
            return not _try_lock(file, kind)
    except FileNotFoundError:
        return False


def _try_lock(file: IO[str], kind: int) -> bool:
    """Take a lock, which others may have for a moment to see whether somebody holds it."""
    for number in range(_LOCK_TRIES if kind == fcntl.LOCK_EX else 1):
        if number:
            time.sleep(_LOCK_PAUSE_S)
        with suppress(OSError):
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
    return False
