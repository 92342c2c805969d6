"""Where files lie: directory or store of objects; hedged requests, pieces kept on disk."""

import glob
import hashlib
import logging
import os
import queue
import re
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from paceline._base.files import open_regular_below, opened_directory, read_limited, replacing_below
from paceline._base.process_and_network import sleep, wait_until
from paceline.data._data_errors import DataChangedError, DataError, DataNotFoundError
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    StorageNotInstalledError,
)
from paceline.storage._object_storage_base import ObjectStorage
from paceline.storage._storage_from_url import storage_from
from paceline.storage._uploads import seconds_from

logger = logging.getLogger(__name__)


T = TypeVar("T")

_FIRST_DELAY_S = 5.0
# A request is slow if it takes so many times as long as the slowest one that was answered.
_FACTOR = 3.0
_MOST_CALLS = 3

# Seconds that a call took, its result, and its error if it failed.
_Ended: TypeAlias = "queue.SimpleQueue[tuple[float, Any, BaseException | None]]"


class HedgedCalls:
    """Hedged calls of functions prone to hang: a slow call is repeated, first answer wins.

    A call that takes three times as long as the slowest answer so far, and 5 seconds at least, is
    repeated beside it, twice at most. A call that hangs keeps a thread until its own time limit;
    the thread does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._slowest_s = 0.0

    def call(self, function: Callable[[], T]) -> T:
        """Return the first answer.

        Raises:
            Exception: The error of the last call, if none had an answer.
        """
        ended: _Ended = queue.SimpleQueue()
        delay_s = max(_FIRST_DELAY_S, _FACTOR * self._slowest_s)
        num_running = 0
        for number in range(1, _MOST_CALLS + 1):
            if _start(function, ended):
                num_running += 1
            elif not num_running:
                # Thread limit reached: the call runs in this thread, without a hedge.
                return function()
            is_last = number == _MOST_CALLS
            while num_running and (first := _first(ended, None if is_last else delay_s)):
                [(seconds, answer, error)] = first
                num_running -= 1
                if error is None:
                    self._slowest_s = max(self._slowest_s, seconds)
                    return answer  # type: ignore[no-any-return]
                if not num_running:
                    raise error
            delay_s *= 2
        raise AssertionError("the last wait has no end")


def _start(function: Callable[[], Any], ended: _Ended) -> bool:
    """Call a function in a thread of its own; return False at the limit of threads."""

    def run() -> None:
        begun = time.monotonic()
        answer, error = None, None
        try:
            answer = function()
        except BaseException as raised:  # raised in the thread that waits
            error = raised
        ended.put((time.monotonic() - begun, answer, error))

    try:
        # A daemon: a read that hangs must not keep the process from ending.
        threading.Thread(target=run, name="paceline-store-read", daemon=True).start()
    except RuntimeError:
        return False
    return True


def _first(ended: _Ended, timeout_s: float | None) -> list[tuple[float, Any, BaseException | None]]:
    """Return the next finished call in a list, or an empty list at the timeout."""

    def wait(slice_s: float | None) -> list[tuple[float, Any, BaseException | None]]:
        try:
            return [ended.get(timeout=slice_s)]
        except queue.Empty:
            return []

    return wait_until(wait, timeout_s)


# Share of the limit left after the oldest pieces are removed: makes removals rare.
_SHARE_LEFT = 0.9


class DiskCache:
    """Directory of cached pieces, shared by the processes of a machine.

    The pieces that were used longest ago are removed.

    Args:
        directory: The directory.
        limit_bytes: How much it may hold.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._num_bytes: int | None = None
        self._has_warned = False

    def get(self, *key: object) -> bytes | None:
        """Return the cached piece of a key, or None."""
        try:
            with (
                opened_directory(self._directory) as directory,
                open_regular_below(directory, _name(key)) as file,
            ):
                data = read_limited(file, self._limit_bytes)
                # The cache removes the pieces that were used longest ago.
                os.utime(file.fileno())
        except OSError:
            return None
        return data

    def put(self, data: bytes, *key: object) -> None:
        """Keep a piece, unless larger than the limit or refused by the disk."""
        if len(data) > self._limit_bytes:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with opened_directory(self._directory) as directory:
                if self._num_bytes is None:
                    self._num_bytes = sum(size for _, size, _ in _pieces(directory))
                with replacing_below(directory, _name(key)) as file:
                    file.write(data)
                self._num_bytes += len(data)
                if self._num_bytes > self._limit_bytes:
                    self._remove_oldest(directory)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Pieces of files are not kept in %s: %s.", self._directory, error)

    def _remove_oldest(self, directory: int) -> None:
        # Other processes add and remove as well.
        pieces = sorted(_pieces(directory))
        total = sum(size for _, size, _ in pieces)
        for _, size, name in pieces:
            if total <= _SHARE_LEFT * self._limit_bytes:
                break
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)
            total -= size
        self._num_bytes = total


def _pieces(directory: int) -> list[tuple[int, int, str]]:
    """Return when each was used last, its size and its name."""
    found = []
    for name in os.listdir(directory):
        # Other processes remove pieces of the same cache.
        with suppress(OSError):
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
            found.append((facts.st_mtime_ns, facts.st_size, name))
    return found


def _name(key: tuple[object, ...]) -> str:
    text = "\0".join(map(str, key))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


READ_TIMEOUT_VARIABLE = "PACELINE_DATA_TIMEOUT_S"
_READ_TIMEOUT_S = 300.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
# Texts of permanent errors: a retry would not help.
_REFUSAL = re.compile("403 Forbidden|AccessDenied|[Cc]redential|AZURE_STORAGE_ACCOUNT")
# Missing-bucket errors: permanent only if the store has never answered before.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_ADDRESS = re.compile(r"\w+://\S+")
_MACHINE_CREDENTIALS = "/latest/api/token"
_NO_CREDENTIALS = (
    " Hint: no credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
    " AWS_SKIP_SIGNATURE=true for a public bucket."
)
_QUERY = re.compile(r"\?[\w-]+=")
_WILD = re.compile(r"[*?\[]")


class FoundFile(NamedTuple):
    """File found: path below the location, size in bytes, and a mark of its version."""

    name: str
    size: int
    mark: str


class FileLocation(ABC):
    """Directory of files, local or remote."""

    def __init__(self, url: str) -> None:
        self.url = url

    def name_of(self, name: str) -> str:
        """Return how messages name a file."""
        return f"{self.url.rstrip('/')}/{name}"

    @abstractmethod
    def find(self, pattern: str) -> list[FoundFile]:
        """Return the files with paths matching a pattern, sorted by name."""

    @abstractmethod
    def read(self, file: FoundFile, offset: int, size: int) -> bytes:
        """Return a piece of a file.

        Raises:
            DataChangedError: It is not the file that was found.
            DataError: It cannot be read.
        """

    @abstractmethod
    def read_whole(self, name: str) -> bytes | None:
        """Return a small file, or None if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""

    def local_path(self, file: FoundFile) -> Path | None:
        """Return the local path of a file, checked to be unchanged; None if remote."""
        return None


class DirectoryLocation(FileLocation):
    """A directory of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def find(self, pattern: str) -> list[FoundFile]:
        """Return the files with paths matching a pattern, sorted by name."""
        names = glob.glob(pattern, root_dir=self._path, recursive=True)
        found = []
        for name in sorted(names):
            try:
                stat = os.stat(self._file(name))
            except OSError:
                # Removed meanwhile, or a link to nothing.
                continue
            if S_ISREG(stat.st_mode):
                found.append(self._found(name, stat))
        return found

    def _file(self, name: str) -> str:
        # Paths as objects would cost as much as the calls of the system.
        return f"{self.url}/{name}"

    def _found(self, name: str, stat: os.stat_result) -> FoundFile:
        return FoundFile(name.replace(os.sep, "/"), stat.st_size, str(stat.st_mtime_ns))

    def read(self, file: FoundFile, offset: int, size: int) -> bytes:
        """Return a piece of a file."""
        with self._naming(file), open(self._file(file.name), "rb") as opened:
            self._check(file, os.fstat(opened.fileno()))
            opened.seek(offset)
            return opened.read(size)

    def local_path(self, file: FoundFile) -> Path:
        """Return the path of a file, checked to be unchanged since the search."""
        with self._naming(file):
            self._check(file, os.stat(self._file(file.name)))
        return self._path / file.name

    def _check(self, file: FoundFile, stat: os.stat_result) -> None:
        if self._found(file.name, stat) != file:
            raise file_changed_error(self.name_of(file.name))

    @contextmanager
    def _naming(self, file: FoundFile) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise file_missing_error(self.name_of(file.name)) from error
        except OSError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"The file {self.name_of(file.name)!r} cannot be read: {error}."
            ) from error

    def read_whole(self, name: str) -> bytes | None:
        """Return a small file, or None if there is none."""
        path = self._path / name
        return path.read_bytes() if path.is_file() else None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically, so readers never see a part."""
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            opened_directory(path.parent) as directory,
            replacing_below(directory, path.name) as file,
        ):
            file.write(data)


class ObjectLocation(FileLocation):
    """Objects below a prefix of an object store, read by the checkpoint storage client.

    A store that fails or does not answer is asked again, for PACELINE_DATA_TIMEOUT_S
    seconds, 300 by default.
    """

    def __init__(self, url: str, storage: ObjectStorage) -> None:
        super().__init__(url)
        self._storage = storage
        self._has_answered = False
        self._reads = HedgedCalls()
        self.disk_cache: DiskCache | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A client, with its credentials, belongs to one process.
        return {**vars(self), "_storage": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _storage=storage_from(state["url"]))

    def find(self, pattern: str) -> list[FoundFile]:
        """Return the objects with keys matching a pattern, sorted by name."""
        prefix = pattern[: _first_wild(pattern)].rpartition("/")[0]
        found = self._again(pattern, lambda: self._storage.objects(f"{prefix}/" if prefix else ""))
        matches = _glob_matcher(pattern)
        return sorted(
            FoundFile(each.key, each.size, each.mark or str(each.changed))
            for each in found
            if matches(each.key)
        )

    def read(self, file: FoundFile, offset: int, size: int) -> bytes:
        """Return a piece of an object."""
        name, mark, cache = file.name, file.mark, self.disk_cache
        key = (self.url, name, mark, offset, size)
        # Objects without a version mark are not cached: a change would go unnoticed.
        data = cache.get(*key) if cache is not None and mark else None
        if data is None or len(data) != size:
            data = self._again(
                name,
                lambda: self._reads.call(
                    lambda: self._storage.read_unchanged(name, offset, size, mark)
                ),
            )
            if cache is not None and mark:
                cache.put(data, *key)
        return data

    def read_whole(self, name: str) -> bytes | None:
        """Return a small object, or None if there is none."""
        try:
            return self._again(name, lambda: b"".join(self._storage.chunks(name, 1 << 23)))
        except DataNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self._again(name, lambda: self._storage.put_file(name, Path(file.name)))

    def _again(self, name: str, ask: Callable[[], T]) -> T:
        """Retry a request to the store until an answer or the time limit."""
        timeout_s = seconds_from(os.environ, READ_TIMEOUT_VARIABLE, _READ_TIMEOUT_S)
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while True:
            with self._naming(name):
                try:
                    answer = ask()
                    self._has_answered = True
                    return answer
                except CheckpointCorruptError:
                    # Damage does not pass.
                    raise
                except CheckpointError as error:
                    file = self.name_of(name)
                    hint = self._hint_of(error, name)
                    if hint is not None:
                        raise DataError(
                            f"The file {file!r} cannot be read. {error}{hint}"
                        ) from error
                    if time.monotonic() + pause_s > deadline:
                        raise DataError(
                            f"The file {file!r} could not be read within {timeout_s:g} s. {error}"
                            f" ({READ_TIMEOUT_VARIABLE} allows more time.)"
                        ) from error
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _hint_of(self, error: CheckpointError, name: str) -> str | None:
        """Return a hint for a permanent error ("" without a hint), None for a transient error."""
        text = str(error)
        if _MACHINE_CREDENTIALS in text:
            # A machine of a cloud gets credentials for the asking, which may fail for a while.
            return None if self._has_answered else _NO_CREDENTIALS
        # Names of files and numbers of ports say nothing about the cause.
        text = _ADDRESS.sub("", text.replace(name, ""))
        is_missing = not self._has_answered and _NO_BUCKET.search(text)
        return "" if is_missing or _REFUSAL.search(text) else None

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if isinstance(error, DataError):
                raise
            raise file_missing_error(self.name_of(name)) from error
        except CheckpointCorruptError as error:
            raise file_changed_error(self.name_of(name)) from error


def file_missing_error(name: str) -> DataNotFoundError:
    """Return the error for a missing file."""
    return DataNotFoundError(f"The file {name!r} must be there, but there is none.")


def file_changed_error(name: str) -> DataChangedError:
    """Return the error for a file changed since the index was made."""
    return DataChangedError(
        f"The file {name!r} must stay as it is while it is read, but it was changed since its data"
        " set was indexed. Hint: make the data set anew; an index that lies beside the files must"
        " be written again."
    )


def location_of(url: str | os.PathLike[str]) -> tuple[FileLocation, str]:
    """Return the place and the pattern of a path, a glob or a URL.

    Raises:
        DataError: No client for such URLs is installed, or it gives no files by name.
        TypeError: It is no path.
    """
    if not isinstance(url, (str, os.PathLike)):
        raise TypeError(
            f"Files must be named by one path, glob or URL, but got {type(url).__name__}. Hint: a"
            " glob such as 'data/part-*.csv' takes several files."
        )
    text = os.fspath(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in ("", "file"):
        path = unquote(text.removeprefix("file://")) if scheme else os.path.expanduser(text)
        base, pattern = _parted_location(os.path.abspath(path))
        return DirectoryLocation(Path(base or "/")), pattern
    if _QUERY.search(text):
        raise ValueError(
            f"A URL of data must have no query, but got {text!r}. Hint: credentials and options"
            " come from the environment."
        )
    base, pattern = _parted_location(text)
    if base.endswith(":/") or "://" not in base:
        base, pattern = text, ""
    if not urlsplit(base).netloc:
        raise ValueError(
            f"A URL of data must be like {scheme}://bucket/data/*.parquet, but got {text!r}."
        )
    try:
        storage = storage_from(base)
    except StorageNotInstalledError as error:
        if scheme in ("s3", "az", "gs"):
            raise
        raise DataError(
            f"Data can be read from paths and from URLs that begin with s3://, az:// or gs://, but"
            f" got {text!r}. Hint: download the files, or mount the store as a directory."
        ) from error
    if not isinstance(storage, ObjectStorage):
        raise DataError(f"Data can be read from stores of objects, but {text!r} is none.")
    return ObjectLocation(base, storage), pattern


def _parted_location(path: str) -> tuple[str, str]:
    """Return the directory and the pattern below; the pattern of a directory is empty."""
    at = _first_wild(path)
    # The names of directories and files may contain other wildcards.
    while at < len(path) and os.path.lexists(_through(path, at)):
        known = len(_through(path, at))
        at = known + _first_wild(path[known:])
    if at < len(path):
        base = path[:at].rpartition("/")[0]
        return base, path[len(base) :].lstrip("/")
    if os.path.isfile(path):
        base, _, last = path.rpartition("/")
        return base, glob.escape(last)
    base, _, last = path.rstrip("/").rpartition("/")
    if PurePosixPath(last).suffix and not os.path.isdir(path):
        return base, last
    return path.rstrip("/"), ""


def _through(path: str, at: int) -> str:
    """Return the path up to the end of the name at a position."""
    end = path.find("/", at)
    return path if end < 0 else path[:end]


def _first_wild(pattern: str) -> int:
    found = _WILD.search(pattern)
    return len(pattern) if found is None else found.start()


def _glob_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function to match keys against a pattern, with the semantics of `glob`."""
    text = re.escape(pattern)
    # The longer ones first: `**` is not two `*`.
    for wild, meaning in (
        (r"\*\*/", "(?:[^/]+/)*"),
        (r"\*\*", ".*"),
        (r"\*", "[^/]*"),
        (r"\?", "[^/]"),
    ):
        text = text.replace(wild, meaning)
    text = re.sub(r"\\\[(!?)(.*?)\\\]", _as_class, text)
    compiled = re.compile(text + r"\Z", re.DOTALL)
    return lambda key: compiled.match(key) is not None


def _as_class(found: "re.Match[str]") -> str:
    return f"[{'^' if found[1] else ''}{found[2].replace(chr(92) + '-', '-')}]"
