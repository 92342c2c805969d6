"""Checkpoints in a bucket or container, reached by obstore."""

import html
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotFoundError,
    PreconditionError,
)
from obstore.store import AzureStore, S3Store

from paceline.storage._errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
)
from paceline.storage._manifest import FileEntry
from paceline.storage._object_storage_base import ObjectStorage
from paceline.storage._shard_upload import ShardUpload
from paceline.storage._stored_object import StoredObject
from paceline.storage._upload import (
    FileSender,
    FileUpload,
    MemoryUpload,
    Upload,
    UploadLimits,
    limit_hint,
)

logger = logging.getLogger(__name__)

Client: TypeAlias = S3Store | AzureStore

# A file's parts are sent at once; the largest file is 10,000 of them, which all stores allow.
_PART_BYTES = 8 * 1024 * 1024
_LARGEST_PARTS = 10_000
_PARTS_AT_ONCE = 8
_CONNECT = timedelta(seconds=10)
_MAX_RETRIES = 8
# For how long a part is tried again, in times of what one try may take.
_RETRY_FACTOR = 2
_PART = re.compile(r"[?&]partNumber=(\d+)")
_BEGINNING = re.compile(r"[?&]uploads\b")
# Where machines of a cloud ask for the credentials that they were given, on all clouds.
_MACHINE_CREDENTIALS = "//169.254.169.254/"
# The answer of a store that refuses a request, and what it says there.
_XML = re.compile(r"<\?xml|<Error>")
_SAID = re.compile(r"<(?:Code|Message)>(.*?)</", re.DOTALL)
_STORE_NAME = re.compile(r"^Generic \w+ error: ")


class BucketStorage(ObjectStorage):
    """Keep checkpoints as objects below a prefix of a bucket.

    Implementers override `scheme`, `_make_client` and what the store calls things.

    Args:
        bucket: The bucket, which must be there.
        prefix: What all keys begin with, without slashes at its ends; empty for none.
    """

    scheme: str
    _small_file_bytes = _PART_BYTES
    _large_files_at_once = 2
    # What a user calls it, and how its errors tell that there is none.
    _kind = "bucket"
    _missing: str
    # Words of the store's errors, and what to do then.
    _hints: Mapping[str, str]
    _server_hint: str
    _credentials: str
    _own_credentials: str

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._made: tuple[int, Client] | None = None
        # What is being stored, by the directory of its other files.
        self._uploads: dict[Path, ShardUpload] = {}

    @classmethod
    def from_url(cls, url: str) -> "BucketStorage":
        """Return the storage of ``SCHEME://BUCKET`` or ``SCHEME://BUCKET/PREFIX``.

        Raises:
            ValueError: It is another URL.
        """
        parts = urlsplit(url)
        if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                f"`checkpoint_storage` must be like {cls.scheme}://{cls._kind}/prefix, but got"
                f" {url!r}. Hint: credentials and the server come from the environment"
                f" ({cls._credentials})."
            )
        return cls(parts.netloc, unquote(parts.path).strip("/"))

    @property
    def url(self) -> str:
        """The bucket and the prefix."""
        return f"{self.scheme}://{self._bucket}/{quote(self._prefix)}".rstrip("/")

    @property
    def is_remote(self) -> bool:
        """Whether every machine with credentials reaches it, as it does."""
        return True

    @abstractmethod
    def _make_client(self, options: Any) -> Client:
        """Return a client with options for requests and retries."""

    # ---- writing -------------------------------------------------------------------------

    def put(self, key: str, file: Path) -> None:
        """Send a file, in parts at once if it is large.

        Raises:
            CheckpointWriteError: The store does not take it, within the time that it has.
        """
        self._send(key, file, UploadLimits.from_environment().file_s)

    def _send(self, key: str, file: Path, timeout_s: float) -> FileEntry:
        with FileUpload(file, _part_bytes(file.stat().st_size), timeout_s) as upload:
            return self._put_upload(key, upload)

    @contextmanager
    def _taking_pieces(self, directory: Path, upload: ShardUpload) -> Iterator[None]:
        self._uploads[directory] = upload
        try:
            yield
        finally:
            del self._uploads[directory]

    def file_sender(self, directory: Path) -> FileSender:
        """Return what sends files from memory in the background, in parts at once if large."""
        upload = self._uploads.get(directory)
        if upload is None:
            raise ValueError(
                "`file_sender` must be called within the block of `store_path` or `store_shard`,"
                f" with its directory, but got {str(directory)!r}."
            )

        def send(name: str, size: int, pieces: Iterable[memoryview]) -> None:
            def put(key: str, timeout_s: float) -> FileEntry:
                wanted = upload.until_stopped(pieces)
                read = MemoryUpload(wanted, size, _part_bytes(size), timeout_s)
                return self._put_upload(key, read)

            upload.begin(name, put)

        return send

    def _put_upload(self, key: str, upload: FileUpload | MemoryUpload) -> FileEntry:
        with self._errors(f"{key!r} ({upload.size} bytes) must be stored", upload=upload):
            source: Any = upload
            if isinstance(upload, MemoryUpload) and upload.num_parts == 1:
                # An iterator would be sent in parts, which takes three requests.
                source = b"".join(upload)
            obstore.put(
                self._client,
                key,
                source,
                chunk_size=_part_bytes(upload.size),
                max_concurrency=_PARTS_AT_ONCE,
            )
            return upload.entry()

    @property
    def _keeps_writers_apart(self) -> bool:
        return True

    def _put_new(self, key: str, data: bytes) -> None:
        with self._errors(f"{key!r} must be stored", writes=True):
            try:
                obstore.put(self._client, key, data, mode="create")
            except AlreadyExistsError:
                # A request may have succeeded whose response was lost, so that it was repeated.
                if bytes(obstore.get(self._client, key).bytes()) != data:
                    raise FileExistsError(f"In {self.url}, {key!r} is there already.") from None

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, many at once."""
        with self._errors(f"{len(keys)} objects must be removed", writes=True):
            if keys:
                obstore.delete(self._client, list(keys))

    # ---- reading -------------------------------------------------------------------------

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Return a piece of an object."""
        with self._errors(f"{key!r} must be read"):
            try:
                found = obstore.get_range(self._client, key, start=offset, length=size)
            except (GenericError, ValueError):
                # There is nothing beyond the end.
                if offset < obstore.head(self._client, key)["size"]:
                    raise
                return b""
            return bytes(found)

    def read_unchanged(self, key: str, offset: int, size: int, mark: str) -> bytes:
        """Return a piece of an object that has an ETag."""
        if not mark or not size:
            return self.read(key, offset, size)
        options: Any = {"range": (offset, offset + size), "if_match": mark}
        with self._errors(f"{key!r} must be read"):
            try:
                return bytes(obstore.get(self._client, key, options=options).bytes())
            except PreconditionError as error:
                raise CheckpointCorruptError(f"In {self.url}, {key!r} was changed.") from error

    def chunks(self, key: str, size: int) -> Iterator[bytes | memoryview]:
        """Yield an object in one request."""
        with self._errors(f"{key!r} must be read"):
            for chunk in obstore.get(self._client, key).stream(min_chunk_size=size):
                yield memoryview(chunk)

    def objects(self, prefix: str) -> Sequence[StoredObject]:
        """Return the objects whose keys begin with a prefix, which is empty or ends in a slash."""
        with self._errors(f"the {self._kind} must be listed"):
            found = [each for page in obstore.list(self._client, prefix) for each in page]
        return [
            StoredObject(
                each["path"],
                each["size"],
                each["last_modified"].timestamp(),
                each["e_tag"] or "",
            )
            for each in found
        ]

    # ---- the client ----------------------------------------------------------------------

    @property
    def _client(self) -> Client:
        """The client of this process: a forked one needs its own."""
        if self._made is None or self._made[0] != os.getpid():
            part = timedelta(seconds=min(UploadLimits.from_environment()))
            options = {
                "client_options": {"timeout": part, "connect_timeout": _CONNECT},
                "retry_config": {
                    "max_retries": _MAX_RETRIES,
                    "retry_timeout": _RETRY_FACTOR * part,
                },
            }
            with self._errors(f"the {self._kind} must be opened"):
                self._made = os.getpid(), self._make_client(options)
        return self._made[1]

    @contextmanager
    def _errors(
        self, must: str, *, writes: bool = False, upload: Upload | None = None
    ) -> Iterator[None]:
        """Turn what the client raises into errors of storages.

        Raises:
            FileNotFoundError: There is no such object.
            CheckpointError: The store does not answer as it should.
        """
        writes = writes or upload is not None
        try:
            yield
        except FileExistsError:
            raise
        except (BaseError, OSError) as error:
            # A missing object is told by either.
            is_missing = isinstance(error, (NotFoundError, FileNotFoundError))
            if is_missing and not writes and self._missing not in str(error):
                raise FileNotFoundError(str(error)) from error
            kind = CheckpointWriteError if writes else CheckpointError
            reason = self._reason(error, upload)
            # The client's own text has many lines, of which the last ones tell nothing new.
            logger.debug("%s", error)
            cause = None if isinstance(error, BaseError) else error
            raise kind(f"In {self.url}, {must}, but {reason}") from cause

    def _reason(self, error: Exception, upload: Upload | None) -> str:
        """Return what a store has said, of which part, and what to do."""
        if upload is not None and upload.is_late:
            return (
                f"after {upload.timeout_s:g} s only {upload.num_sent} of its {upload.num_parts}"
                f" parts were read to be sent. {limit_hint('file')}"
            )
        text = str(error)
        if self._missing in text:
            return (
                f"there is no such {self._kind} ({self._missing}). Hint: make the {self._kind}, or"
                " correct the URL (`checkpoint_storage` for checkpoints)."
            )
        reason = _words_of(text) or repr(error)
        cause, hint = self._cause_and_hint(text)
        place = "" if upload is None else f"{_part_of(text, upload)}: "
        return f"{place}{cause}{reason}.{hint}"

    def _cause_and_hint(self, text: str) -> tuple[str, str]:
        """Return what the client's error means in plain words, and what to do."""
        if _MACHINE_CREDENTIALS in text:
            cause = "there are no credentials in the environment, and this machine has none: "
            return cause, f" Hint: set {self._own_credentials}."
        if "kind: Timeout" in text:
            return "no answer came in time: ", f" {limit_hint('part')}"
        if "kind: Connect" in text:
            return "the server is not reached: ", f" Hint: {self._server_hint}"
        hint = next((hint for words, hint in self._hints.items() if words in text), "")
        return "", f" Hint: {hint}" if hint else ""


def _part_bytes(size: int) -> int:
    return max(_PART_BYTES, -(-size // _LARGEST_PARTS))


def _words_of(text: str) -> str:
    """Return the first line of an error, and of an answer in XML what a store says in it."""
    # After it, the client tells the same once more.
    text = text.partition("\n\nDebug source:")[0]
    if said := _SAID.findall(text):
        told = (html.unescape(each.strip().splitlines()[0]) for each in said if each.strip())
        text = ": ".join([_XML.split(text)[0].rstrip(" :\n\ufeff"), *told])
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return _STORE_NAME.sub("", line).rstrip(".")


def _part_of(text: str, upload: Upload) -> str:
    """Return the part of a file that an error is about."""
    found = _PART.search(text)
    if found is not None:
        return f"part {found[1]} of {upload.num_parts}"
    if upload.num_parts == 1:
        return "part 1 of 1"
    where = "before part 1" if _BEGINNING.search(text) else "a part"
    return f"{where} of {upload.num_parts}"


def endpoint_of(variable: str) -> str:
    """Return the server that a variable names, empty if it is not set.

    Raises:
        CheckpointError: It is no URL. The client would break down at its first request.
    """
    endpoint = os.environ.get(variable, "")
    if endpoint and not re.match("https?://.", endpoint):
        raise CheckpointError(
            f"{variable} must begin with http:// or https://, but got {endpoint!r}."
        )
    return endpoint
