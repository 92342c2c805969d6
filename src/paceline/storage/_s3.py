"""Checkpoints in a bucket of S3, or of a server that speaks its protocol."""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, GenericError, NotFoundError
from obstore.store import S3Store

from paceline.storage._errors import CheckpointError, CheckpointWriteError
from paceline.storage._objects import ObjectStorage, StoredObject

# A file's parts are sent at once; the largest file is 10,000 of them, which S3 allows.
_PART_BYTES = 8 * 1024 * 1024
_LARGEST_PARTS = 10_000
_PARTS_AT_ONCE = 8
# A part or a request that takes longer has failed, and is tried again for so long.
_REQUEST = timedelta(seconds=60)
_CONNECT = timedelta(seconds=10)
_RETRY = timedelta(seconds=120)
_MAX_RETRIES = 8
_PART = re.compile(r"[?&]partNumber=(\d+)")


class S3Storage(ObjectStorage):
    """Keep checkpoints as objects below a prefix of a bucket.

    Credentials, region and server are those of the environment: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL, else what the machine
    itself has been given by AWS, else, where boto3 is installed, what it finds.

    Args:
        bucket: The bucket, which must be there.
        prefix: What all keys begin with, without slashes at its ends; empty for none.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._made: tuple[int, S3Store] | None = None

    @classmethod
    def from_url(cls, url: str) -> "S3Storage":
        """Return the storage of ``s3://BUCKET`` or ``s3://BUCKET/PREFIX``.

        Raises:
            ValueError: It is another URL.
        """
        parts = urlsplit(url)
        if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
            hint = "credentials and the server come from the environment (AWS_ENDPOINT_URL)"
            raise ValueError(
                f"`checkpoint_storage` must be like s3://bucket/prefix, but got {url!r}. Hint:"
                f" {hint}."
            )
        return cls(parts.netloc, unquote(parts.path).strip("/"))

    @property
    def url(self) -> str:
        """The bucket and the prefix."""
        return f"s3://{self._bucket}/{quote(self._prefix)}".rstrip("/")

    @property
    def is_remote(self) -> bool:
        """Whether every machine with credentials reaches it, as it does."""
        return True

    def put(self, key: str, file: Path) -> None:
        """Send a file, in parts at once if it is large.

        Raises:
            CheckpointWriteError: The store does not take it, within the time that a part has.
        """
        size = file.stat().st_size
        part = max(_PART_BYTES, -(-size // _LARGEST_PARTS))
        with self._errors(f"{key!r} ({size} bytes) must be stored", writes=True):
            obstore.put(self._store, key, file, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Return a piece of an object."""
        with self._errors(f"{key!r} must be read"):
            try:
                found = obstore.get_range(self._store, key, start=offset, length=size)
            except GenericError:
                # There is nothing beyond the end.
                if offset < obstore.head(self._store, key)["size"]:
                    raise
                return b""
            return bytes(found)

    def chunks(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object in one request."""
        with self._errors(f"{key!r} must be read"):
            for chunk in obstore.get(self._store, key).stream(min_chunk_size=size):
                yield bytes(chunk)

    def objects(self, prefix: str) -> Sequence[StoredObject]:
        """Return the objects whose keys begin with a prefix, which is empty or ends in a slash."""
        with self._errors("the bucket must be listed"):
            found = [each for page in obstore.list(self._store, prefix) for each in page]
        return [
            StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
            for each in found
        ]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, many at once."""
        with self._errors(f"{len(keys)} objects must be removed", writes=True):
            if keys:
                obstore.delete(self._store, list(keys))

    @property
    def _store(self) -> S3Store:
        """The client of this process: a forked one needs its own."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), self._make_store()
        return self._made[1]

    def _make_store(self) -> S3Store:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        config: Any = {"endpoint": endpoint} if endpoint else {}
        with self._errors("the bucket must be opened"):
            return S3Store(
                self._bucket,
                prefix=self._prefix or None,
                config=config,
                client_options={
                    "timeout": _REQUEST,
                    "connect_timeout": _CONNECT,
                    # A server of one's own, as for tests, may have no certificate.
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": _RETRY},
                credential_provider=_credentials_of_boto3(os.environ),
            )

    @contextmanager
    def _errors(self, must: str, *, writes: bool = False) -> Iterator[None]:
        """Turn what the client raises into errors of storages.

        Raises:
            FileNotFoundError: There is no such object.
            CheckpointError: The store does not answer as it should.
        """
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            # A missing object is told by either.
            is_missing = isinstance(error, (NotFoundError, FileNotFoundError))
            if is_missing and not writes and "NoSuchBucket" not in str(error):
                raise FileNotFoundError(str(error)) from error
            kind = CheckpointWriteError if writes else CheckpointError
            raise kind(f"In {self.url}, {must}, but {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    """Return what a store has said, without the client's own names for it, and of which part."""
    if "NoSuchBucket" in str(error):
        return "there is no such bucket"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].removeprefix("Generic S3 error: ").rstrip(".") if lines else repr(error)
    part = _PART.search(str(error))
    return reason if part is None else f"part {part[1]}: {reason}"


def _credentials_of_boto3(environment: Mapping[str, str]) -> Any:
    """Return what finds credentials in profiles and the like, if boto3 is there and has some."""
    if "AWS_ACCESS_KEY_ID" in environment or importlib.util.find_spec("boto3") is None:
        return None
    from boto3 import Session  # type: ignore[import-untyped]
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None
