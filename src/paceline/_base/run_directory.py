"""Run directory: facts of the run, the runner's messages, and all journals."""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from paceline._base.files import (
    open_regular_below,
    opened_below,
    opened_directory,
    read_limited,
    read_regular,
    regular_opener,
    write_atomically,
)
from paceline._base.journal_reading_and_writing import JournalReader
from paceline._base.journal_records import check_seal, seal

RUN_FORMAT_VERSION = 1
MAX_SMALL_BYTES = 64 * 1024
REFUSED_FILE_STATUSES = frozenset({400, 404, 405, 413, 422})


class TrialInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a trial for its processes to read."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]
    config: dict[str, Any]

    @property
    def max_length(self) -> int | None:
        """Length of the longest training of the search, in its unit; None if it has no length."""
        return configured_length(self.config.get("searcher") or {})


def configured_length(searcher: Mapping[str, Any]) -> int | None:
    """Return the longest training length of a searcher config, or None if there is no length."""
    length = searcher.get("max_length", searcher.get("max_time"))
    if isinstance(length, Mapping):
        length = next(iter(length.values()), None)
    return length if isinstance(length, int) and length > 0 else None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`, written before the processes start and never changed.

    `trial` is None for a run without a master. `attempt` is the attempt that the processes belong
    to when a runner or launcher made the directory; a run without a master counts its attempts by
    their journals. `seed` and `hparams` belong to a run without a master, if they are known.
    `judged_metrics` names the validation metrics that a search needs to judge a report; None if
    there is no search that stops trials, or a master that does not set `Control.judged`.
    `metadata` holds the values that earlier attempts of the trial set. `container_slot_counts` are
    the slots of each node of `container_addrs`; those of this one on each if it is empty. With
    `storage_per_node`, each node of an attempt on several keeps checkpoints in its run directory.
    `previous` is the `run_id` of the newest run of the same name when a run without a master began.
    `newest_report` is the journal and number of rank 0's last record before this attempt, if others
    may be lost: a state in memory that is newer is not used.
    """

    version: int = RUN_FORMAT_VERSION
    run_id: str
    name: str
    created: float
    attempt: int = 0
    generation: int = 0
    trial: TrialInfo | None = None
    latest_checkpoint: str | None = None
    steps_completed: int = 0
    checkpoint_storage: str
    cluster_id: str = ""
    agent_id: str = ""
    slot_ids: list[int] = []
    container_addrs: list[str] = []
    container_rank: int = 0
    container_slot_counts: list[int] = []
    arguments: list[str] = []
    seed: int | None = None
    hparams: dict[str, Any] | None = None
    labels: list[str] = []
    judged_metrics: list[str] | None = None
    metadata: dict[str, Any] | None = None
    storage_per_node: bool = False
    previous: str | None = None
    newest_report: tuple[str, int] | None = None


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Last message of the runner to the processes; the file is replaced as a whole.

    Attributes:
        should_preempt: Checkpoint and leave.
        operation_length: The target of the current search operation (absolute), None before the
            first one is known.
        operations_closed: No operation follows the ones completed so far.
        best_validation: The best searched metric of the whole experiment that is known.
        judged: Generation and sequence number of the chief's newest record that the search has
            judged: this file already reflects that record. Not every record changes the file.
        reports_released: The number of the chief's newest report that a stepwise run may continue
            from, None before the first one is known.
        is_stopped: A stepwise run is to end at its present report.
    """

    should_preempt: bool = False
    operation_length: int | None = None
    operations_closed: bool = False
    best_validation: float | dict[str, str] | None = None
    judged: tuple[int, int] | None = None
    reports_released: int | None = None
    is_stopped: bool = False


RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"
# Causes of the end of workers restarted by a launcher, as JSON; see `AttemptStarted`.
RESTART_CAUSES_VARIABLE = "PACELINE_RESTART_CAUSES"
# Meeting port of the launchers of an attempt on several nodes.
MEETING_PORT_VARIABLE = "PACELINE_MEETING_PORT"
_LAUNCH_ERROR_FILE = "launch_error.txt"
# A run on another machine that gives no sign of life for longer is lost.
HEARTBEAT_LIMIT_S = 60.0
# A run's first file that is so much younger than the run was copied without its time.
_COPIED_S = 60.0

# Whoever asks whether a run is alive holds its lock for a moment.
_LOCK_TRIES = 6
_LOCK_PAUSE_S = 0.02
# Ends the note of a checkpoint that another process commits.
_PART = ".part"
_MAX_FILE_PATH = 1024
# Longer numbers were counted by nobody, and a database has no place for them.
_JOURNAL_NAME = re.compile(r"a([0-9]{1,9})\.g([0-9]{1,9})\.r([0-9]{1,9})")
# A forged file must not fill the memory of a reader, such as a master.
_MAX_INFO_BYTES = 64 * 2**20


class RunVersionError(ValueError):
    """Raised when a run directory has another format version."""


class NotARunDirectoryError(ValueError):
    """Raised when a path holds no run directory."""


def check_file_path(path: str) -> str:
    """Return the path of a run's file, once checked.

    Raises:
        ValueError: It could lead out of the run's files, or has characters that no file name has.
    """
    parts = path.split("/")
    is_fit = path.isprintable() and "\\" not in path and len(path.encode()) <= _MAX_FILE_PATH
    if not is_fit or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            "The path of a file must be relative, of printable characters, without `.`, `..` or"
            f" empty parts, and at most {_MAX_FILE_PATH} bytes long, but got {path!r:.300}."
        )
    return path


class JournalKey(msgspec.Struct, frozen=True, order=True):
    """Identity of the process writing a journal: attempt, generation and rank."""

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
    ``logs/``, ``files/``, ``begun_checkpoints/`` and, for runs without a master, ``checkpoints/``,
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
        # Mode set again: `mkdir` leaves the mode of an existing directory.
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
            # No link: a stranger's run must not show the facts of another one.
            with (
                opened_directory(self.path) as directory,
                open_regular_below(directory, self._info_path.name) as file,
            ):
                data = read_limited(file, _MAX_INFO_BYTES)
            version = msgspec.json.decode(data)["version"]
            # Checksum of this version only: another version may seal its file in another way.
            if version == RUN_FORMAT_VERSION:
                check_seal(data)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            why = getattr(error, "strerror", None) or error
            raise NotARunDirectoryError(
                f"{str(self.path)!r} must be a Paceline run directory, but its run.json cannot be"
                f" read ({why})."
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
    def control_path(self) -> Path:
        """Path of the file with the runner's requests to the processes."""
        return self.path / "control.json"

    @property
    def checkpoints_path(self) -> Path:
        """Where a run without a master keeps its checkpoints."""
        return self.path / "checkpoints"

    @property
    def _begun_path(self) -> Path:
        return self.path / "begun_checkpoints"

    @property
    def files_path(self) -> Path:
        """Directory of the run's files, such as media."""
        return self.path / "files"

    @property
    def logs_path(self) -> Path:
        """Directory of the launchers' output files, a file for each rank."""
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
        """Note a checkpoint being written, for the cleanup after a killed process.

        A full disk is no error: the note is then missing.

        Args:
            uuid: The checkpoint.
            storage: The URL of its storage.
            is_part: Whether another process commits it, which may have another run directory.
        """
        with suppress(OSError):
            self._begun_path.mkdir(mode=0o700, exist_ok=True)
            (self._begun_path / f"{uuid}{_PART * is_part}").write_text(storage)

    def forget_checkpoint(self, uuid: str) -> None:
        """Remove the notes of a checkpoint after its commit or removal."""
        for suffix in ("", _PART):
            with suppress(OSError):
                (self._begun_path / f"{uuid}{suffix}").unlink()

    def begun_checkpoints(self, *, is_part: bool = False) -> dict[str, str]:
        """Return the UUIDs of the checkpoints being written, with their storages.

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
        """Return the directory of a journal."""
        return self.path / "journal" / key.directory_name

    def write_launch_error(self, text: str) -> None:
        """Write why the workers of all nodes have ended, for the runner of this node."""
        write_atomically(self.path / _LAUNCH_ERROR_FILE, text.encode(errors="replace"))

    def read_launch_error(self) -> str | None:
        """Return why the workers have ended; None without a report of a launcher."""
        try:
            text = read_regular(self.path / _LAUNCH_ERROR_FILE).decode(errors="replace")
            return text.strip() or None
        except OSError:
            return None

    def journal_keys(self) -> list[JournalKey]:
        """Return the keys of all journals, ordered by attempt, generation and rank."""
        try:
            with (
                opened_directory(self.path) as directory,
                opened_below(directory, "journal") as root,
            ):
                names = os.listdir(root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [_JOURNAL_NAME.fullmatch(name) for name in names]
        return sorted(JournalKey(*map(int, match.groups())) for match in matches if match)

    def reader(self, key: JournalKey, *, after: int = -1) -> JournalReader:
        """Return a reader of a journal, starting after a sequence number."""
        return JournalReader(self.journal_path(key), after=after, root=self.path)

    @contextmanager
    def hold_attempt_lock(self) -> Iterator[bool]:
        """Hold the lock marking the run as alive; yield False if another process holds the lock.

        The operating system releases the lock at any end of the process.
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
        """Hold a lock shared by the ranks to mark the run as alive after its chief's end.

        Without this mark, reports of ranks after their chief was killed would look like those of a
        run that has ended.
        """
        try:
            # Info file as the lock: it exists before the processes start and is never replaced.
            file = open(self._info_path, opener=regular_opener)  # noqa: SIM115 - closed below
        except OSError:
            # A machine that does not see the directory: another check names it.
            yield
            return
        with file:
            with suppress(OSError):
                # Shared lock: all ranks hold it at once; probes ask for an exclusive lock.
                fcntl.flock(file, fcntl.LOCK_SH)
            _held.add(file)
            try:
                yield
            finally:
                _held.discard(file)

    def beat(self) -> None:
        """Write a heartbeat of the process holding the attempt lock.

        Raises:
            OSError: It cannot be written.
        """
        host = os.uname().nodename
        # Same host: a new time stamp is enough, without a new file.
        if self._beating_host() == host:
            os.utime(self._heartbeat_path)
        else:
            write_atomically(self._heartbeat_path, host.encode())

    def end_heartbeat(self) -> None:
        """Remove the heartbeat: no further heartbeat will come."""
        with suppress(OSError):
            self._heartbeat_path.unlink()

    def keep_last_beat(self, attempt: int) -> None:
        """Keep the time of an attempt's last heartbeat, before the next attempt writes its own.

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
        # Times in a copied directory say nothing about the run's processes.
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
        """Return whether the run's last heartbeat is recent, if from another machine.

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
        """Return whether a process is at work on the run.

        On this machine, the chief holds the attempt lock, and other ranks hold a lock of theirs. A
        lock that another machine holds may not be seen, or may outlive that machine: there, signs
        of life count.
        """
        is_beating = self.is_beating_elsewhere()
        if is_beating is not None:
            return is_beating
        if _is_locked(self._lock_path, fcntl.LOCK_SH):
            return True
        return _is_locked(self._info_path, fcntl.LOCK_EX)


# A forked child, such as a data loader's worker, would hold the lock beyond its parent's death.
_held: set[IO[str]] = set()


def _drop_held() -> None:
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_drop_held)


def _is_locked(path: Path, kind: int) -> bool:
    try:
        with (
            opened_directory(path.parent) as directory,
            open_regular_below(directory, path.name) as file,
        ):
            return not _try_lock(file, kind)
    except FileNotFoundError:
        return False


def _try_lock(file: IO[Any], kind: int) -> bool:
    """Try to take a lock; retry, since others take the lock for moments to probe its holder."""
    # Exclusive locks only: a probe's short shared lock can refuse them for a moment.
    for number in range(_LOCK_TRIES if kind == fcntl.LOCK_EX else 1):
        if number:
            time.sleep(_LOCK_PAUSE_S)
        with suppress(OSError):
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
    return False


"""Part of each media record, so that others need not be decoded."""
"""Size up to which a file is sent without asking first whether it is there already."""
"""HTTP statuses of a master that will never take a file; an older one knows no files."""
