"""Uploads to an object store: files hashed as they are read, a rank's shard, background calls."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import xxhash

from paceline import faults
from paceline._base.process_and_network import wait_until
from paceline.storage import _checkpoint_files
from paceline.storage._checkpoint_errors import CheckpointError, CheckpointWriteError
from paceline.storage._checkpoint_files import FileEntry, check_file_names

_DEFAULTS_S = {"PART": 60.0, "FILE": 1800.0, "CHECKPOINT": 3600.0}

FileSender: TypeAlias = Callable[[str, int, Iterable[memoryview]], None]
"""Stores a file of a checkpoint from memory: its name, its size in bytes and its pieces in order.

It may return before the file is stored. The memory must stay as it is until the block of
`store_path` or `store_shard` has ended, which waits for all files. An error is raised by the next
call, or at the end of the block.
"""


class Upload:
    """Data sent to a store, in parts and within a time limit.

    Args:
        size: The size in bytes.
        part_bytes: The size of the parts in which it is sent.
        timeout_s: After how many seconds reading raises TimeoutError.

    Attributes:
        size: As given.
        num_parts: How many parts it has.
        timeout_s: As given.
        is_late: Whether the time was over.
    """

    def __init__(self, size: int, part_bytes: int, timeout_s: float) -> None:
        self.size = size
        self.num_parts = max(1, -(-size // part_bytes))
        self.timeout_s = timeout_s
        self.is_late = False
        self._part_bytes = part_bytes
        self._deadline = time.monotonic() + timeout_s
        self._hasher = xxhash.xxh3_128()
        self._num_hashed = 0

    @property
    def num_sent(self) -> int:
        """How many parts were read by the client."""
        return self._num_hashed // self._part_bytes

    def entry(self) -> FileEntry:
        """Return the size and digest of the data, once all of the data was read."""
        return FileEntry(self._num_hashed, self._hasher.hexdigest())

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            self.is_late = True
            raise TimeoutError(f"{self.num_sent} of {self.num_parts} parts were sent in time.")

    def _digest_data(self, data: bytes | memoryview) -> None:
        self._hasher.update(data)
        self._num_hashed += len(data)


class FileUpload(Upload):
    """File read in order by a client; use the object in a `with` statement.

    Args:
        path: The file.
        part_bytes: The size of the parts in which it is sent.
        timeout_s: After how many seconds reading raises TimeoutError.
    """

    def __init__(self, path: Path, part_bytes: int, timeout_s: float) -> None:
        super().__init__(path.stat().st_size, part_bytes, timeout_s)
        self._path = path
        self._file = path.open("rb")

    def read(self, size: int = -1) -> bytes:
        """Return the next piece.

        Raises:
            TimeoutError: The time is over.
        """
        self._check_time()
        data = self._file.read(size)
        self._digest_data(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move on in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place in the file."""
        return self._file.tell()

    def entry(self) -> FileEntry:
        """Return the size and digest of the file, once all of the file was read."""
        if self._num_hashed != self.size:
            # The client has read a part again, for a retry.
            return _checkpoint_files.digest_file(self._path)
        return super().entry()

    def __enter__(self) -> "FileUpload":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class MemoryUpload(Upload):
    """Pieces of memory read once, in order, by a client.

    Args:
        pieces: The pieces.
        size: The bytes of all of them.
        part_bytes: The size of the parts in which they are sent.
        timeout_s: After how many seconds reading raises TimeoutError.
    """

    def __init__(
        self, pieces: Iterable[memoryview], size: int, part_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(size, part_bytes, timeout_s)
        self._pieces = pieces

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the pieces, none larger than a part.

        Raises:
            TimeoutError: The time is over.
            ValueError: They have another size than was said.
        """
        for piece in self._pieces:
            # View of bytes: the length of a typed view counts elements.
            data = piece.cast("B")
            for begin in range(0, len(data), self._part_bytes):
                self._check_time()
                part = data[begin : begin + self._part_bytes]
                self._digest_data(part)
                yield part
        if self._num_hashed != self.size:
            raise ValueError(
                f"The pieces of a file must have {self.size} bytes together, as was said, but have"
                f" {self._num_hashed}."
            )


class UploadLimits(NamedTuple):
    """Time limits in seconds: for a part of a file, a file, and a rank's files of a checkpoint.

    A part that takes longer is sent again for twice as long; then it has failed.
    """

    part_s: float
    file_s: float
    checkpoint_s: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "UploadLimits":
        """Return the limits set by PACELINE_STORE_PART_TIMEOUT_S and related variables.

        Raises:
            ValueError: One is no number above 0.
        """
        variables = os.environ if environment is None else environment
        return cls(
            *(seconds_from(variables, _name(what), _DEFAULTS_S[what]) for what in _DEFAULTS_S)
        )


def _name(what: str) -> str:
    return f"PACELINE_STORE_{what}_TIMEOUT_S"


def seconds_from(environment: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of seconds from an environment variable.

    Raises:
        ValueError: It is no number above 0.
    """
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Negated comparison: it refuses NaN as well.
    if not value > 0:
        raise ValueError(f"`{name}` must be a number of seconds above 0, but got {text!r}.")
    return value


def limit_hint(what: str) -> str:
    """Return how to allow more time for a "part", a "file" or a "checkpoint"."""
    return f"Hint: {_name(what.upper())} allows more time."


class BackgroundCalls:
    """Runs calls in daemon threads, so no call keeps a process from ending.

    At the limit of threads, a call runs in the caller's thread. Leaving a `with` block
    waits for all calls.

    Args:
        at_once: How many run at once; 0 for all in the thread of the caller.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._changed = threading.Condition()
        self._num_running = 0
        self._error: BaseException | None = None

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call, as soon as fewer than allowed are running.

        Raises:
            BaseException: The error of an earlier call.
        """
        if self._at_once < 1:
            call()
            return
        self._wait_for_fewer_than(self._at_once)
        with self._changed:
            self._num_running += 1
        thread = threading.Thread(
            target=self._run, args=(call,), name="paceline-store-background", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # At the limit of threads, or at the end of the interpreter.
            with self._changed:
                self._num_running -= 1
            call()

    def wait(self) -> None:
        """Wait for all calls.

        Raises:
            BaseException: The error of the first call to fail.
        """
        self._wait_for_fewer_than(1)

    def _wait_for_fewer_than(self, number: int) -> None:
        with self._changed:
            wait_until(
                lambda slice_s: self._changed.wait_for(lambda: self._num_running < number, slice_s)
            )
            if self._error is not None:
                raise self._error

    def _run(self, call: Callable[[], object]) -> None:
        error = None
        try:
            call()
        except BaseException as raised:  # raised by the next call of a method
            error = raised
        with self._changed:
            # The first error counts: later ones follow from it.
            self._error = self._error or error
            self._num_running -= 1
            self._changed.notify_all()

    def __enter__(self) -> "BackgroundCalls":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.wait()
        except Exception:
            # Exception of the block: it has precedence over an exception of a call.
            if error is None:
                raise


_FILES_AT_ONCE = 4


class ShardUpload:
    """A rank's files of a checkpoint on their way to a store.

    Args:
        url: The store.
        uuid: The checkpoint.
        rank: The rank.
        large_files_at_once: How many large files are sent at once in the background.

    Attributes:
        entries: The files that are there, by name.
        has_failed: Whether the store did not take one.
    """

    def __init__(self, url: str, uuid: str, rank: int, *, large_files_at_once: int = 0) -> None:
        self.uuid = uuid
        self.rank = rank
        self.entries: dict[str, FileEntry] = {}
        self.has_failed = False
        self._url = url
        self._limits = UploadLimits.from_environment()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._begun: set[str] = set()
        self._large = BackgroundCalls(large_files_at_once)
        self._is_stopped = False

    @property
    def num_begun(self) -> int:
        """How many files are being sent, or are there."""
        return len(self._begun)

    def begin(self, name: str, send: Callable[..., FileEntry]) -> None:
        """Send a large file as `send` does, in the background.

        Raises:
            CheckpointWriteError: An earlier file cannot be stored.
            ValueError: There is such a file already.
        """
        check_file_names([name])
        self.check_new([name])
        self._begun.add(name)
        self._large.start(partial(self._send_unless_stopped, name, send))

    def wait(self) -> None:
        """Wait for the files sent in the background.

        Raises:
            CheckpointWriteError: One cannot be stored.
        """
        self._large.wait()
        assert not self._is_stopped

    def stop(self) -> None:
        """Send no further part of files in the background, and wait until nothing is on its way."""
        self._is_stopped = True
        with suppress(Exception):
            self._large.wait()

    def until_stopped(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield pieces.

        Raises:
            _StoppedError: Nothing is to be sent any more.
        """
        for piece in pieces:
            if self._is_stopped:
                raise _StoppedError
            yield piece

    def send(self, name: str, send: Callable[..., FileEntry], num_files: int | None = None) -> None:
        """Send a file with a function taking the file's key and its time limit in seconds.

        Args:
            name: The file's name in the checkpoint.
            send: The function; the arguments are `key` and `timeout_s`.
            num_files: The number of all files, if it is known.

        Raises:
            CheckpointWriteError: It cannot be stored, or the time for the checkpoint is over.
            ValueError: There is such a file already.
        """
        check_file_names([name])
        self.check_new([name])
        self._begun.add(name)
        self._send(name, send, num_files)

    def _send_unless_stopped(self, name: str, send: Callable[..., FileEntry]) -> None:
        # Reason of the stop: it is raised instead of this error.
        with suppress(_StoppedError):
            self._send(name, send, None)

    def _send(self, name: str, send: Callable[..., FileEntry], num_files: int | None) -> None:
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
                faults.reach("storage.begun")
            else:
                # Earlier files: they may still be on their way at this point.
                faults.reach("storage.between_files")
        left_s = self._began + self._limits.checkpoint_s - time.monotonic()
        with self._noting_failure(), naming_object(self.uuid, self.rank, repr(name)):
            if left_s <= 0:
                of_all = "" if num_files is None else f"{num_files} "
                raise CheckpointWriteError(
                    f"After {self._limits.checkpoint_s:g} s only {len(self.entries)} of the rank's"
                    f" {of_all}files were stored in {self._url}. {limit_hint('checkpoint')}"
                )
            self.entries[name] = send(
                key=f"{self.uuid}/{name}", timeout_s=min(self._limits.file_s, left_s)
            )

    def check_new(self, names: Sequence[str]) -> None:
        """Check the names against the files begun before.

        Raises:
            ValueError: There is one.
        """
        for name in names:
            if name in self._begun:
                raise ValueError(f"A checkpoint must have each file once, but {name!r} is there.")

    def send_together(self, names: Sequence[str], send: Callable[[str], None]) -> None:
        """Send files by a function, several at once where there may be more threads."""
        if len(names) > 1:
            pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="paceline-store")
            calls = []
            try:
                # At the limit of threads, or at the end of the interpreter.
                with suppress(RuntimeError):
                    for name in names:
                        calls.append(pool.submit(send, name))
                # Too few threads: the remaining files are sent by this thread below.
                if len(calls) < len(names):
                    pool.shutdown(cancel_futures=True)
                for call in calls:
                    if not call.cancelled():
                        call.result()
            finally:
                pool.shutdown(cancel_futures=True)
        for name in names:
            if name not in self.entries:
                send(name)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            self.has_failed = self._is_stopped = True
            raise


def stored_before(uuid: str, rank: int) -> FileExistsError:
    """Return the error for an already stored part."""
    return FileExistsError(
        f"A checkpoint is immutable, but {uuid} has a shard of rank {rank} already."
        " Hint: store under a new UUID."
    )


class _StoppedError(Exception):
    """Raised to the client of a store to abort an upload."""


@contextmanager
def naming_object(uuid: str, rank: int, what: str) -> Iterator[None]:
    """Name the rank and the file in an error of the store.

    Raises:
        CheckpointWriteError: The body raised it.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointWriteError(
            f"Rank {rank} could not store {what} of checkpoint {uuid}, and earlier checkpoints are"
            f" untouched. {error}"
        ) from error
