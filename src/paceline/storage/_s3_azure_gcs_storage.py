"""Checkpoints in a bucket of S3, Azure or Google, by obstore with repeated requests."""

import html
import importlib.util
import logging
import os
import random
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotFoundError,
    PreconditionError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
)
from paceline.storage._checkpoint_files import FileEntry
from paceline.storage._object_storage_base import ObjectStorage, StoredObject
from paceline.storage._uploads import (
    FileSender,
    FileUpload,
    MemoryUpload,
    ShardUpload,
    Upload,
    UploadLimits,
    limit_hint,
)

logger = logging.getLogger(__name__)


_Result = TypeVar("_Result")

# Metadata address of cloud machines: the source of their credentials in all clouds.
MACHINE_CREDENTIALS = "//169.254.169.254/"
# Errors of the client without an answer, or from a server unable to answer at this moment.
_AWAY = re.compile(r"HTTP error|status code: (?:408|429|500|502|503|504|507|509)\b")

# Users seed the generator of the module `random`, and forked processes share its state.
_random = random.SystemRandom()

_FIRST_PAUSE_S = 0.1
# The longest pause, and how long a store is away before that is reported, as shares of one try.
_LONGEST_PAUSE = 1 / 4
_REPORTED_AFTER = 1 / 12


def may_pass(error: Exception) -> bool:
    """Return whether an error of the client means a store not answering at this moment."""
    if not isinstance(error, BaseError):
        return False
    text = str(error)
    return _AWAY.search(text) is not None and MACHINE_CREDENTIALS not in text


class PatientCalls:
    """Repeats calls to a store after passing errors; usable from any thread.

    Attributes:
        on_trouble: Called, in any thread, with the reason once the store has not answered for a
            while, and with None once it answers again.
    """

    def __init__(self, url: str) -> None:
        self.on_trouble: Callable[[str | None], None] | None = None
        self._url = url
        self._lock = threading.Lock()
        self._is_in_trouble = False

    def call(self, function: Callable[[], _Result], try_s: float, patience_s: float) -> _Result:
        """Return the result of a function; call the function again while the store is silent.

        Args:
            function: The function. Repeating it must do no harm.
            try_s: How many seconds one try may take.
            patience_s: For how many seconds tries begin.
        """
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                result = function()
            except Exception as error:
                if not may_pass(error):
                    raise
                passed_s = time.monotonic() - began
                left_s = patience_s - passed_s
                # A short silence is not worth a line.
                if left_s <= 0 or passed_s >= _REPORTED_AFTER * try_s:
                    self.note_trouble(error, max(left_s, 0.0))
                if left_s <= 0:
                    raise
                # Random: many ranks must not ask a recovering store at the same moment.
                time.sleep(min(_random.uniform(pause_s / 2, pause_s), left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE * try_s)
            else:
                self.note_answer()
                return result

    def note_trouble(self, error: Exception, left_s: float = 0.0) -> None:
        """Report a silent store, once until the store answers again."""
        with self._lock:
            if self._is_in_trouble:
                return
            self._is_in_trouble = True
            reason = str(error).partition("\n")[0]
            goes_on = f"; it is asked again for {left_s:.0f} s" if left_s else ""
            logger.warning("The store %s does not answer%s: %s", self._url, goes_on, reason)
            self._report(reason)

    def note_answer(self) -> None:
        """Report a store answering again after a reported silence."""
        with self._lock:
            if not self._is_in_trouble:
                return
            self._is_in_trouble = False
            logger.warning("The store %s answers again.", self._url)
            self._report(None)

    def _report(self, reason: str | None) -> None:
        try:
            if self.on_trouble is not None:
                self.on_trouble(reason)
        except Exception:
            # The report must not stop the call itself.
            logger.exception("The state of the store %s cannot be reported.", self._url)


_PART = re.compile(r"[?&]partNumber=(\d+)")
_BEGINNING = re.compile(r"[?&]uploads\b")
# The answer of a store that refuses a request, and its text.
_XML = re.compile(r"<\?xml|<Error>")
_SAID = re.compile(r"<(?:Code|Message)>(.*?)</", re.DOTALL)
_STORE_NAME = re.compile(r"^Generic \w+ error: ")


def words_of(text: str) -> str:
    """Return the first line of an error, with the store's own message from an XML answer."""
    # After it, the client repeats the same text.
    text = text.partition("\n\nDebug source:")[0]
    if said := _SAID.findall(text):
        told = (html.unescape(each.strip().splitlines()[0]) for each in said if each.strip())
        text = ": ".join([_XML.split(text)[0].rstrip(" :\n\ufeff"), *told])
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return _STORE_NAME.sub("", line).rstrip(".")


def part_of(text: str, upload: Upload) -> str:
    """Return the part of a file named by an error."""
    found = _PART.search(text)
    if found is not None:
        return f"part {found[1]} of {upload.num_parts}"
    if upload.num_parts == 1:
        return "part 1 of 1"
    where = "before part 1" if _BEGINNING.search(text) else "a part"
    return f"{where} of {upload.num_parts}"


Client: TypeAlias = S3Store | AzureStore | GCSStore

# A file's parts are sent at once; the largest file is 10,000 of them, which all stores allow.
_PART_BYTES = 8 * 1024 * 1024
_LARGEST_PARTS = 10_000
_PARTS_AT_ONCE = 8
_CONNECT = timedelta(seconds=10)
# `PatientCalls` repeats requests, so that the client for them does not. Another client repeats the
# parts of a file, which is read once, and takes up streams where they broke off, with growing
# pauses, until their time is over.
_MANY_RETRIES = 10_000
# Total time of a request with its repeats, as a multiple of the time limit of a single try.
_RETRY_FACTOR = 2
# Total time of a request and of a single try (seconds) while other work waits for the answer.
_HURRIED_S = 5.0
_HURRIED_TRY_S = 10.0


class BucketStorage(ObjectStorage):
    """Keep checkpoints as objects below a prefix of a bucket.

    Implementers override `scheme`, `_make_client` and the words of the store.

    Args:
        bucket: The bucket, which must be there.
        prefix: The prefix of all keys, without slashes at its ends; empty for none.
    """

    scheme: str
    _small_file_bytes = _PART_BYTES
    _large_files_at_once = 2
    # User-facing name of a bucket, and the store's error text for a missing bucket.
    _kind = "bucket"
    _missing: str
    # Words of the store's errors, and the fix for each.
    _hints: Mapping[str, str]
    _server_hint: str
    _credentials: str
    _own_credentials: str

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._made: tuple[int, tuple[Client, Client]] | None = None
        self._calls = PatientCalls(self.url)
        self._is_hurried = False
        # Running uploads by the temporary directory with their other files.
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
        """Whether every machine with credentials reaches this storage: always for a bucket."""
        return True

    def watch(self, on_trouble: Callable[[str | None], None] | None) -> None:
        """Register a function to call while the store does not answer."""
        self._calls.on_trouble = on_trouble

    def in_a_hurry(self) -> "BucketStorage":
        """Return this storage, from now on giving up soon on a silent store."""
        self._is_hurried, self._made = True, None
        return self

    @abstractmethod
    def _make_client(self, options: Any) -> Client:
        """Return a client with options for requests and retries."""

    # ---- writing -------------------------------------------------------------------------

    def put(self, key: str, file: Path) -> None:
        """Send a file; send the parts of a large file concurrently.

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
        """Return a sender of files from memory: in the background, large files in parts."""
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
            if upload.num_parts == 1:
                # An iterator would be sent in parts, which takes three requests.
                data = upload.read() if isinstance(upload, FileUpload) else b"".join(upload)
                self._tried(lambda client: obstore.put(client, key, data))
                return upload.entry()
            source: Any = upload
            obstore.put(
                self._clients[1],
                key,
                source,
                chunk_size=_part_bytes(upload.size),
                max_concurrency=_PARTS_AT_ONCE,
            )
            self._calls.note_answer()
            return upload.entry()

    @property
    def _keeps_writers_apart(self) -> bool:
        return True

    def _put_new(self, key: str, data: bytes) -> None:
        def put(client: Client) -> None:
            try:
                obstore.put(client, key, data, mode="create")
            except AlreadyExistsError:
                # A request may have succeeded whose response was lost, so that it was repeated.
                if bytes(obstore.get(client, key).bytes()) != data:
                    raise FileExistsError(f"In {self.url}, {key!r} is there already.") from None

        with self._errors(f"{key!r} must be stored", writes=True):
            self._tried(put)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, many at once."""
        with self._errors(f"{len(keys)} objects must be removed", writes=True):
            try:
                if keys:
                    self._tried(lambda client: obstore.delete(client, list(keys)))
            except (NotFoundError, FileNotFoundError) as error:
                if self._missing in str(error):
                    raise
                # Missing object among many: the error says nothing about the keys after it.
                for key in keys:
                    self._remove_one(key)

    def _remove_one(self, key: str) -> None:
        try:
            self._tried(lambda client: obstore.delete(client, key))
        except (NotFoundError, FileNotFoundError) as error:
            # An object that is gone already is fine, a missing bucket is not.
            if self._missing in str(error):
                raise

    # ---- reading -------------------------------------------------------------------------

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Return a piece of an object."""

        def read(client: Client) -> bytes:
            try:
                return bytes(obstore.get_range(client, key, start=offset, length=size))
            except (GenericError, ValueError) as error:
                # There is nothing beyond the end.
                if may_pass(error) or offset < obstore.head(client, key)["size"]:
                    raise
                return b""

        with self._errors(f"{key!r} must be read"):
            return self._tried(read)

    def read_unchanged(self, key: str, offset: int, size: int, mark: str) -> bytes:
        """Return a piece of an object with an ETag."""
        if not mark or not size:
            return self.read(key, offset, size)
        # The store refuses if the object was replaced since: pieces of two versions must not mix.
        options: Any = {"range": (offset, offset + size), "if_match": mark}
        with self._errors(f"{key!r} must be read"):
            try:
                return self._tried(lambda c: bytes(obstore.get(c, key, options=options).bytes()))
            except PreconditionError as error:
                raise CheckpointCorruptError(f"In {self.url}, {key!r} was changed.") from error

    def _read_whole(self, key: str) -> bytes | None:
        with suppress(FileNotFoundError), self._errors(f"{key!r} must be read"):
            return self._tried(lambda client: bytes(obstore.get(client, key).bytes()))
        return None

    def chunks(self, key: str, size: int) -> Iterator[bytes | memoryview]:
        """Yield the pieces of an object from a single streamed request."""
        with self._errors(f"{key!r} must be read"):
            for chunk in obstore.get(self._clients[1], key).stream(min_chunk_size=size):
                yield memoryview(chunk)

    def objects(self, prefix: str) -> Sequence[StoredObject]:
        """Return the objects with a key prefix; the prefix is empty or ends in a slash."""
        with self._errors(f"the {self._kind} must be listed"):
            found = self._tried(
                lambda client: [each for page in obstore.list(client, prefix) for each in page]
            )
        return [
            StoredObject(
                each["path"], each["size"], each["last_modified"].timestamp(), each["e_tag"] or ""
            )
            for each in found
        ]

    # ---- the client ----------------------------------------------------------------------

    @property
    def _clients(self) -> tuple[Client, Client]:
        """The clients of this process for requests, and for parts and streams.

        A forked process needs its own.
        """
        if self._made is None or self._made[0] != os.getpid():
            with self._errors(f"the {self._kind} must be opened"):
                self._made = os.getpid(), (self._new_client(0), self._new_client(_MANY_RETRIES))
        return self._made[1]

    def _new_client(self, max_retries: int) -> Client:
        retries = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=self._patience_s)}
        client_options = {"timeout": timedelta(seconds=self._try_s), "connect_timeout": _CONNECT}
        return self._make_client({"client_options": client_options, "retry_config": retries})

    def _tried(self, function: Callable[[Client], _Result]) -> _Result:
        """Call a function with a client until the store answers, or has not for too long."""
        client = self._clients[0]
        return self._calls.call(lambda: function(client), self._try_s, self._patience_s)

    @property
    def _try_s(self) -> float:
        limit = min(UploadLimits.from_environment())
        return min(limit, _HURRIED_TRY_S) if self._is_hurried else limit

    @property
    def _patience_s(self) -> float:
        return _HURRIED_S if self._is_hurried else _RETRY_FACTOR * self._try_s

    @contextmanager
    def _errors(
        self, must: str, *, writes: bool = False, upload: Upload | None = None
    ) -> Iterator[None]:
        """Turn exceptions of the client into storage errors.

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
            # Either error can mean that the object is missing.
            is_missing = isinstance(error, (NotFoundError, FileNotFoundError))
            if is_missing and not writes and self._missing not in str(error):
                raise FileNotFoundError(str(error)) from error
            kind = CheckpointWriteError if writes else CheckpointError
            reason = self._reason(error, upload)
            # The client's own text has many lines, of which the last ones add nothing.
            logger.debug("%s", error)
            cause = None if isinstance(error, BaseError) else error
            raised = kind(f"In {self.url}, {must}, but {reason}")
            if may_pass(error):
                raised.failing_store = self.url
                self._calls.note_trouble(raised)
            raise raised from cause

    def _reason(self, error: Exception, upload: Upload | None) -> str:
        """Return the store's message, the affected part, and a hint for the user."""
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
        reason = words_of(text) or repr(error)
        cause, hint = self._cause_and_hint(text)
        place = "" if upload is None else f"{part_of(text, upload)}: "
        return f"{place}{cause}{reason}.{hint}"

    def _cause_and_hint(self, text: str) -> tuple[str, str]:
        """Return the cause of a client error in plain words, and a hint."""
        if MACHINE_CREDENTIALS in text:
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


def endpoint_of(variable: str) -> str:
    """Return the server URL in an environment variable; empty if not set.

    Raises:
        CheckpointError: It is no URL. The client would break down at its first request.
    """
    endpoint = os.environ.get(variable, "")
    if endpoint and not re.match("https?://.", endpoint):
        raise CheckpointError(
            f"{variable} must begin with http:// or https://, but got {endpoint!r}."
        )
    return endpoint


_CONFIGURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY must be those of the account"


class AzureStorage(BucketStorage):
    """Keep checkpoints as blobs below a prefix of a container.

    The account and credentials come from the environment: AZURE_STORAGE_ACCOUNT_NAME and
    AZURE_STORAGE_ACCOUNT_KEY (or another credential that obstore reads there, such as
    AZURE_STORAGE_SAS_KEY), and AZURE_STORAGE_ENDPOINT for your own server.
    """

    scheme = "az"
    _kind = "container"
    _missing = "ContainerNotFound"
    _hints = {
        "AuthenticationFailed": f"{_CONFIGURE}.",
        "AuthorizationFailure": f"{_CONFIGURE}.",
        "Account must be specified": f"{_CONFIGURE}.",
    }
    _server_hint = "AZURE_STORAGE_ENDPOINT must name a server that answers."
    _credentials = "AZURE_STORAGE_ACCOUNT_NAME"
    _own_credentials = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"

    def _make_client(self, options: Any) -> AzureStore:
        endpoint = endpoint_of("AZURE_STORAGE_ENDPOINT")
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        config: Any = {"endpoint": endpoint} if endpoint else {}
        return AzureStore(self._bucket, prefix=self._prefix or None, config=config, **options)


_RENEW = "renew the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN)."


class S3Storage(BucketStorage):
    """Keep checkpoints as objects below a prefix of a bucket.

    Credentials, region and server come from the environment: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL, else the role
    that AWS gave the machine, else, where boto3 is installed, the credentials that boto3 finds.
    """

    scheme = "s3"
    _missing = "NoSuchBucket"
    _hints = {
        "ExpiredToken": _RENEW,
        "InvalidAccessKeyId": _RENEW,
        "SignatureDoesNotMatch": _RENEW,
        "AccessDenied": "the credentials must allow to list, read, write and delete there.",
        "NotImplemented": "AWS_CONDITIONAL_PUT=disabled is for servers without `If-None-Match`.",
    }
    _server_hint = "AWS_ENDPOINT_URL must name a server that answers."
    _credentials = "AWS_ENDPOINT_URL"
    _own_credentials = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

    def _make_client(self, options: Any) -> S3Store:
        endpoint = endpoint_of("AWS_ENDPOINT_URL_S3") or endpoint_of("AWS_ENDPOINT_URL")
        config: Any = {"endpoint": endpoint} if endpoint else {}
        # A private server, as for tests, may have no certificate.
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            credential_provider=_boto3_credentials(os.environ),
            **options,
        )

    @property
    def _keeps_writers_apart(self) -> bool:
        return os.environ.get("AWS_CONDITIONAL_PUT") != "disabled"

    def _put_new(self, key: str, data: bytes) -> None:
        if self._keeps_writers_apart:
            super()._put_new(key, data)
        else:
            self._put_data(key, data)


def _boto3_credentials(environment: Mapping[str, str]) -> Any:
    """Return boto3's credential provider (profiles etc.); None without boto3 or credentials."""
    if "AWS_ACCESS_KEY_ID" in environment or importlib.util.find_spec("boto3") is None:
        return None
    from boto3 import Session  # type: ignore[import-untyped]
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None


_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"


class GoogleStorage(BucketStorage):
    """Keep checkpoints as objects below a prefix of a bucket of Google Cloud Storage.

    Credentials come from the environment: GOOGLE_APPLICATION_CREDENTIALS or
    GOOGLE_SERVICE_ACCOUNT, the path of a file, or GOOGLE_SERVICE_ACCOUNT_KEY, its text; else from
    the machine's service account. GOOGLE_BASE_URL names a server of your own. It is experimental: a
    stand-in has run the contract suite, Google's server has not.
    """

    scheme = "gs"
    _missing = "NoSuchBucket"
    _hints = {
        "AccessDenied": "the account must be allowed to list, read, write and delete there.",
        "token request": f"{_CREDENTIALS} must name a file of credentials that are valid.",
    }
    _server_hint = "GOOGLE_BASE_URL must name a server that answers."
    _credentials = _own_credentials = _CREDENTIALS

    def _make_client(self, options: Any) -> GCSStore:
        with _warning_lock:
            _warn_experimental()
        endpoint = endpoint_of("GOOGLE_BASE_URL")
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        return GCSStore(self._bucket, prefix=self._prefix or None, **options)


_warning_lock = threading.Lock()


@cache
def _warn_experimental() -> None:
    """Log the warning of the first use in this process."""
    logger.warning(
        "gs:// storages are experimental: they were tested against a stand-in for Google Cloud"
        " Storage, not against Google's server. Keep a copy of what you cannot lose."
    )
