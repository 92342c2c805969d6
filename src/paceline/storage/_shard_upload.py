"""One rank's files of a checkpoint, on their way to a store of objects."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from paceline import faults
from paceline.storage._background_calls import BackgroundCalls
from paceline.storage._errors import CheckpointError, CheckpointWriteError
from paceline.storage._manifest import FileEntry, check_file_names
from paceline.storage._upload import UploadLimits, limit_hint

_FILES_AT_ONCE = 4


class ShardUpload:
    """One rank's files of a checkpoint on their way to a store.

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
        """Wait for the files that are sent in the background.

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
        """Send a file by a function, which is given its key and how many seconds it has.

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
        # What has stopped it is told instead.
        with suppress(_StoppedError):
            self._send(name, send, None)

    def _send(self, name: str, send: Callable[..., FileEntry], num_files: int | None) -> None:
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
                faults.reach("storage.begun")
            else:
                # Those before it may still be on their way.
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
        """Check that no file of these names was begun.

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
    """Return the error of a part that is there already."""
    return FileExistsError(
        f"A checkpoint is immutable, but {uuid} has a shard of rank {rank} already."
        " Hint: store under a new UUID."
    )


class _StoppedError(Exception):
    """Raised to the client of a store, so that it breaks an upload off."""


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
