"""Preparation of an attempt: packed code, its uv environment, reasons of a failed start.

This module must stay light, as the client and the CLI load it.

End of an attempt: finding its cause, storing the end, and reporting it to the master.

`attempt_processes` imports this module late.
"""

import bz2
import contextlib
import copy
import errno
import gzip
import logging
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from paceline import faults
from paceline._base.files import regular_opener
from paceline._base.journal_records import AttemptFinished
from paceline._base.process_and_network import integer_setting
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._cluster.messages.runner_messages import AttemptEnd
from paceline._cluster.messages.states import ErrorKind, ExitReason, end_kind
from paceline._cluster.runner.attempt_directory import AttemptDirectory, sends_checkpoints
from paceline._cluster.runner.master_link_and_output import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
)
from paceline._cluster.runner.record_shipping import Shipper
from paceline._cluster.runner.trial_memories import keep_memory
from paceline._training.workers.processes.signals_and_leftovers import end_marked, kill_leftover
from paceline.core._run_storage import discard_unfinished

logger = logging.getLogger(__name__)

# No space, no inodes or no quota left on a disk; no file descriptors, processes or memory.
_SHORTAGES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
}
# A disk or a file server that does not answer, or not well.
_DISTURBANCES = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
# The text of Python's error alone says that the system gave it no thread.
_NO_THREAD = "can't start new thread"


class UnusableConfigError(ValueError):
    """Raised when an attempt cannot start as its configuration says."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error or any of its causes is a temporary shortage of resources."""
    return any(
        isinstance(cause, MemoryError) or str(cause) == _NO_THREAD or _has_number(cause, _SHORTAGES)
        for cause in _causes(error)
    )


def judge_start(error: BaseException) -> tuple[ExitReason, ErrorKind]:
    """Return the exit reason and error kind for an error during an attempt's start."""
    if is_shortage(error):
        return ExitReason.SHORTAGE, ErrorKind.TRANSIENT
    kind = ErrorKind.PERMANENT
    if any(_has_number(cause, _DISTURBANCES) for cause in _causes(error)):
        kind = ErrorKind.TRANSIENT
    elif isinstance(error, UnusableConfigError):
        kind = ErrorKind.USER
    return ExitReason.START_FAILED, kind


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def _has_number(error: BaseException, numbers: set[int]) -> bool:
    return isinstance(error, OSError) and error.errno in numbers


_MIB = 1024 * 1024
# Size limit of one read by `tarfile` other than file content: names and metadata of a member.
_MAX_READ_BYTES = 4 * _MIB
_SKIP_BYTES = 64 * 1024
_OPENERS: tuple[tuple[bytes, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ", lzma.LZMAFile),
)


class ArchiveTooLargeError(ValueError):
    """Raised when an archive holds more than the limits allow."""


class ArchiveLimits(NamedTuple):
    """Maximum number of bytes and files in an unpacked archive."""

    num_bytes: int
    num_files: int

    @classmethod
    def from_environment(cls) -> "ArchiveLimits":
        """Return limits from `PACELINE_MAX_UNPACKED_MIB` and `PACELINE_MAX_UNPACKED_FILES`.

        Raises:
            ValueError: One is no number above 0.
        """
        return cls(
            integer_setting("PACELINE_MAX_UNPACKED_MIB", 1024) * _MIB,
            integer_setting("PACELINE_MAX_UNPACKED_FILES", 100_000),
        )


class _LimitedFile:
    """Unpacked stream of an archive as a file; reading beyond the limits raises an error."""

    def __init__(self, file: Any, limits: ArchiveLimits) -> None:
        self._file = file
        self._limits = limits
        self._num_read = 0

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _MAX_READ_BYTES:
            raise ArchiveTooLargeError(
                "The facts of a file in an archive of code must have at most"
                f" {_MAX_READ_BYTES // _MIB} MiB, but have more."
            )
        data: bytes = self._file.read(size)
        self._count(len(data))
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        assert whence == 0
        if position < self.tell():
            # All before is unpacked once more. It is needed only for a link to a file that is gone.
            self._count(position)
            self._file.seek(position)
        while (missing := position - self.tell()) > 0:
            if not self.read(min(missing, _SKIP_BYTES)):
                break
        return self.tell()

    def _count(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._num_read > self._limits.num_bytes + self._limits.num_files * tarfile.BLOCKSIZE:
            raise _too_large(self._limits)


@contextmanager
def open_archive(path: Path, limits: ArchiveLimits) -> Iterator[tarfile.TarFile]:
    """Open an archive for reading; content beyond the limits raises an error.

    Raises:
        ArchiveTooLargeError: The archive is too large, while it is read.
        tarfile.TarError: It is none.
        OSError: It cannot be read.
    """
    with open(path, "rb", opener=regular_opener) as file:
        start = file.read(8)
        file.seek(0)
        opener = next((found for magic, found in _OPENERS if start.startswith(magic)), None)
        content = _LimitedFile(file if opener is None else opener(file), limits)
        # Uncompressed mode: `content` decompresses itself, so its limits count every byte.
        with tarfile.open(fileobj=content, mode="r:") as archive:  # type: ignore[call-overload]
            yield archive


def members(archive: tarfile.TarFile, limits: ArchiveLimits) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, each before its content is read.

    Raises:
        ArchiveTooLargeError: There are too many, or they are too large together.
    """
    num_bytes = 0
    for number, member in enumerate(archive, 1):
        num_bytes += member.size
        if number > limits.num_files or num_bytes > limits.num_bytes:
            raise _too_large(limits)
        yield member


def members_inside(found: Iterable[tarfile.TarInfo], target: Path) -> Iterator[tarfile.TarInfo]:
    """Yield archive members, each checked just before its extraction like `tarfile.data_filter`.

    Owners, special modes and write access for others are left out.

    Raises:
        tarfile.TarError: A member is neither a file, a directory nor a link, or leads outside of
            the directory.
    """
    root = os.path.realpath(target)
    for member in found:
        name = member.name.lstrip("/")
        place = os.path.join(root, name)
        # Real path just before extraction: links extracted earlier may redirect the member.
        _check_inside(root, os.path.realpath(place), member)
        if member.issym():
            link = os.path.join(os.path.dirname(place), member.linkname)
            _check_inside(root, os.path.realpath(link), member)
        elif member.islnk():
            link = os.path.join(root, member.linkname)
            _check_inside(root, os.path.realpath(link), member)
        elif not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is a special file")
        own = copy.copy(member)
        own.name, own.uid, own.gid = name, os.getuid(), os.getgid()
        own.uname = own.gname = ""
        own.mode = 0o700 | member.mode & 0o755 if member.isdir() else 0o600 | member.mode & 0o755
        yield own


def _check_inside(root: str, place: str, member: tarfile.TarInfo) -> None:
    if os.path.commonpath([root, place]) != root:
        raise tarfile.TarError(f"{member.name!r} leads outside of the directory")


def check_archive(path: Path, limits: ArchiveLimits) -> None:
    """Check an archive's size; a damaged archive passes if its readable part is small enough.

    Raises:
        ArchiveTooLargeError: It is too large.
    """
    try:
        with open_archive(path, limits) as archive:
            for _ in members(archive, limits):
                pass
    except ArchiveTooLargeError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, lzma.LZMAError):
        # Unpacking reports its faults.
        return


def unpack_archive(path: Path, target: Path, limits: ArchiveLimits) -> None:
    """Unpack an archive into a directory; nothing is written outside the directory.

    Raises:
        ArchiveTooLargeError: It is too large.
        tarfile.TarError: It is no archive, or has a member that leads outside.
        OSError: It cannot be read, or there is no space.
    """
    with open_archive(path, limits) as archive:
        found = members(archive, limits)
        if hasattr(tarfile, "data_filter"):
            archive.extractall(target, found, filter="data")
        else:
            # Python 3.10 before 3.10.12, and 3.11 before 3.11.4, as in Debian 12.
            archive.extractall(target, members_inside(found, target))  # noqa: S202 - as it checks


def _too_large(limits: ArchiveLimits) -> ArchiveTooLargeError:
    return ArchiveTooLargeError(
        f"An archive of code must unpack to at most {limits.num_bytes // _MIB} MiB and"
        f" {limits.num_files} files, but has more. Hint: read data from a path outside of the code,"
        " or raise PACELINE_MAX_UNPACKED_MIB or PACELINE_MAX_UNPACKED_FILES of the master."
    )


LOCK_NAME = "uv.lock"

_POLL_S = 0.2
_NUM_LINES_TOLD = 8


def sync_environment(
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Install the packages of the lock file, and return variables pointing to the environment.

    Args:
        directory: The copy of the code, with `pyproject.toml` and `uv.lock`.
        environment: The variables of the attempt.
        on_line: Gets each line that `uv` prints.
        is_unwanted: Tells whether the attempt is to end; the installation then ends early.

    Raises:
        UnusableConfigError: There is no `uv` or no lock file, or `uv` fails.
    """
    program = find_uv(environment)
    if program is None:
        raise UnusableConfigError(
            f"`environment.uv` needs the program `uv` on {os.uname().nodename!r}, but it is not"
            " there. Hint: `pip install uv` for the interpreter of the runner, or put it on PATH."
        )
    if not (directory / LOCK_NAME).is_file():
        raise UnusableConfigError(missing_lock(directory))
    # Variables of an environment activated for the runner must not affect `uv`.
    kept = {k: v for k, v in environment.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    place = directory / ".venv"
    kept["UV_PROJECT_ENVIRONMENT"] = str(place)
    _run_uv([program, "sync", "--frozen", "--no-progress"], directory, kept, on_line, is_unwanted)
    path = os.pathsep.join([str(place / "bin"), kept.get("PATH", os.defpath)])
    return kept | {"VIRTUAL_ENV": str(place), "PATH": path}


def find_uv(environment: Mapping[str, str]) -> str | None:
    """Return the path of `uv`: on PATH, or beside this interpreter."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("uv", path=environment.get("PATH")) or shutil.which("uv", path=beside)


def missing_lock(directory: Path) -> str:
    """Return the error message for a directory without a lock file."""
    return (
        f"`environment.uv` needs the file {LOCK_NAME!r} in the directory of the code, but"
        f" {str(directory)!r} has none. Hint: `uv lock` makes it from `pyproject.toml`."
    )


def _run_uv(
    command: list[str],
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool],
) -> None:
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=_NUM_LINES_TOLD)

    def pass_on() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                last.append(line.rstrip())
                on_line(line.rstrip("\n"))

    reader = threading.Thread(target=pass_on, name="uv-output", daemon=True)
    reader.start()
    while (code := _wait(process)) is None:
        if is_unwanted():
            # The whole group: uv's children hold the pipe as well.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
    reader.join()
    if code:
        text = "\n".join(last)
        raise UnusableConfigError(f"`uv sync --frozen` ended with code {code}:\n{text}")


def _wait(process: "subprocess.Popen[str]") -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def end_leftovers(directory: AttemptDirectory) -> None:
    """End all remaining processes of an attempt, whatever their session or parent."""
    try:
        process = directory.read_process()
        if process is not None:
            kill_leftover(*process)
    except (msgspec.DecodeError, ValueError) as error:
        logger.error("The processes of the earlier runner are not known: %s", error)
    try:
        mark = directory.read_spec().mark
    except (OSError, msgspec.DecodeError):
        return
    # Processes that left their session or lost their parent still have the mark.
    if mark is not None and (num_ended := end_marked(mark)):
        logger.warning("%d processes that the attempt had left were ended.", num_ended)


faults.register("runner.end_shipped")

# How long a runner whose attempt has ended tries to reach a master before it leaves the rest to
# the next one.
_LAST_WORDS_S = 5.0
_LONGEST_DETAIL = 4000
# A quick look that spares decoding all other records.
_FINISHED = b'"finished"'


def make_attempt_end(
    reason: ExitReason,
    *,
    code: int | None = None,
    signum: int | None = None,
    detail: str | None = None,
    is_launch_error: bool = False,
    at: float | None = None,
    kind: ErrorKind | None = None,
    store: str | None = None,
) -> AttemptEnd:
    """Return how an attempt ended.

    `is_launch_error` says that `detail` is a launcher's. `at` is in seconds since the epoch, now by
    default. `kind` follows from reason and code by default, and from a `store` that did not answer.
    """
    if store is not None:
        # A store without an answer may come back, and is no fault of the code.
        kind = ErrorKind.TRANSIENT
    return AttemptEnd(
        reason=reason,
        code=code,
        signal=signum,
        time=time.time() if at is None else at,
        detail=_sendable(detail),
        is_launch_error=is_launch_error,
        kind=kind or end_kind(reason, code == 0),
        store=store,
    )


def write_attempt_end(directory: AttemptDirectory, end: AttemptEnd) -> None:
    """Write how the attempt ended; the master gets the report even if the disk is full."""
    try:
        directory.write_end(end)
    except OSError as error:
        logger.error("How the attempt ended cannot be written: %s", error)


def report_failed_start(directory: AttemptDirectory, error: Exception) -> None:
    """Report the failed start of an attempt with an unreadable specification."""
    text = f"The attempt's specification cannot be read: {type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        directory.mark_started()
    # The next attempt gets a directory of its own: a power cut can have taken the last writes.
    end = make_attempt_end(ExitReason.START_FAILED, detail=text, kind=ErrorKind.TRANSIENT)
    write_attempt_end(directory, end)
    _ship_by_path(directory, end)


def ship_leftover_reports(directory: AttemptDirectory) -> None:
    """Send an earlier runner's leftover reports, and end its remaining processes."""
    # Processes first: they could still write records.
    end_leftovers(directory)
    discard_unfinished(directory.run)
    end = read_end(directory)
    if end is None:
        end = keep_memory(directory, _end_without_word(directory.run))
        write_attempt_end(directory, end)
    try:
        spec = directory.read_spec()
    except (OSError, msgspec.DecodeError):
        logger.exception("The attempt's specification cannot be read.")
        _ship_by_path(directory, end)
        return
    link = MasterLink.of_attempt(spec)
    shipper = Shipper(
        directory,
        spec.attempt_id,
        link,
        member=spec.member,
    )
    if sends_checkpoints(spec, directory.run):
        shipper.send_checkpoints()
    ship_end(shipper, end)


def read_end(directory: AttemptDirectory) -> AttemptEnd | None:
    """Return the attempt's stored end, None if there is no readable end."""
    try:
        return directory.read_end()
    except msgspec.DecodeError as error:
        logger.error("What was left of the attempt's end cannot be read: %s", error)
        return None


def read_attempt_finish(run: RunDirectory) -> AttemptFinished | None:
    """Return the final record of the chief's newest journal, None if the journal was cut off.

    After a full disk the count of lost reports may follow it.
    """
    chiefs = [key for key in run.journal_keys() if key.rank == 0]
    return _read_finish(run, chiefs[-1]) if chiefs else None


def _read_finish(run: RunDirectory, key: JournalKey) -> AttemptFinished | None:
    finish = None
    try:
        for entry in run.reader(key):
            # Most records need no decoding to see that they are others.
            if _FINISHED in entry.payload and isinstance(record := entry.decode(), AttemptFinished):
                finish = record
    except Exception as error:
        logger.error("The journal of rank %d cannot be read to its end: %s", key.rank, error)
    return finish


def read_failing_store(run: RunDirectory) -> str | None:
    """Return the unresponsive storage if the newest processes failed because of a storage.

    The first rank that failed by itself counts.
    """
    keys = run.journal_keys()
    newest = {(key.attempt, key.generation) for key in keys[-1:]}
    finishes = [
        finish
        for key in keys
        if (key.attempt, key.generation) in newest
        and (finish := _read_finish(run, key)) is not None
        and finish.outcome == "error"
        and not finish.is_consequence
    ]
    first = min(finishes, key=lambda finish: finish.time, default=None)
    return None if first is None else first.store


def ship_end(shipper: Shipper, end: AttemptEnd, lost: str | None = None) -> None:
    """Send the rest and the end, or leave them for the next master; `lost` reports lost output."""
    shipper.note_end(end)
    deadline = time.monotonic() + _LAST_WORDS_S
    backoff = MasterBackoff()
    while True:
        try:
            rest_error = _rest_error(shipper)
            output_error = shipper.ship_output()
            told = " ".join(text for text in (lost, output_error) if text) or None
            shipper.ship_end(_judged_end(end, shipper, rest_error, told))
            faults.reach("runner.end_shipped")
            if output_error is not None:
                shipper.keep_output()
            return
        except UnreachableError as error:
            # The next answer may come from another master, with other marks.
            shipper.forget_positions()
            if time.monotonic() > deadline:
                logger.info("The master is away (%s); the next one will ship the rest.", error)
                return
            time.sleep(backoff.next_s())
        except RefusedByMasterError as error:
            logger.error("The master does not take the attempt's end: %s", error)
            return


def _rest_error(shipper: Shipper) -> str | None:
    """Send the remaining records; return the error if sending can succeed neither now nor later.

    The end must arrive all the same, or the trial would wait for it for ever.
    """
    try:
        shipper.ship_records()
    except UnreachableError:
        raise
    except Exception as error:
        logger.exception("What the attempt left cannot be sent.")
        return str(error) or type(error).__name__
    return shipper.unreadable


def _judged_end(
    end: AttemptEnd, shipper: Shipper, rest_error: str | None, output_error: str | None
) -> AttemptEnd:
    """Return the end with the errors of the attempt's reports and output added.

    Records set aside and output that cannot be stored are named, and change nothing else. If the
    reports as a whole cannot be stored, the attempt has failed.
    """
    details = [end.detail, shipper.set_aside, shipper.unsent, output_error]
    if rest_error is not None or shipper.set_aside:
        # A resume from memory would leave a gap in the reports.
        end = msgspec.structs.replace(end, memory="")
    if rest_error is not None:
        details.append(f"What the attempt reported cannot be stored: {rest_error}")
        # Another attempt has another journal, so it is worth a restart.
        end = msgspec.structs.replace(end, code=end.code or 1, kind=ErrorKind.PERMANENT)
    detail = " ".join(text for text in details if text) or None
    return msgspec.structs.replace(end, detail=_sendable(detail))


def _end_without_word(run: RunDirectory) -> AttemptEnd:
    """Return the end of an attempt without a stored end, as far as the journal shows.

    An error of the code counts as the loss of the runner, which may have caused it: the code could
    not print any more.
    """
    finish = read_attempt_finish(run)
    if finish is None:
        return make_attempt_end(ExitReason.RUNNER_LOST)
    if finish.outcome == "error":
        detail = f"the runner died, and the code failed: {finish.error}"
        return make_attempt_end(ExitReason.RUNNER_LOST, detail=detail, at=finish.time)
    return make_attempt_end(ExitReason.EXITED, code=0, detail=finish.error, at=finish.time)


def _ship_by_path(directory: AttemptDirectory, end: AttemptEnd) -> None:
    """Send an end with the address derived from the path: ``<home>/attempts/<attempt id>``."""
    path = directory.path.absolute()
    if not path.name.isdecimal():
        logger.error("The attempt's number is not known: %s", path)
        return
    home = path.parent.parent
    ship_end(Shipper(directory, int(path.name), MasterLink.of_home(home)), end)


def _sendable(text: str | None) -> str | None:
    """Return the text without characters invalid in JSON, cut to a maximum length."""
    if text is None:
        return None
    return text.encode("utf-8", "replace").decode()[:_LONGEST_DETAIL]
