"""Base class of storages in an object store, for example a bucket or a table."""

import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import xxhash

from paceline import faults
from paceline._base.files import temporary_directory
from paceline.storage import _checkpoint_errors, _checkpoint_files
from paceline.storage._checkpoint_errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    failing_store_of,
)
from paceline.storage._checkpoint_storage import (
    PROBE_BYTES,
    CheckpointStorage,
    UuidList,
    check_uuid,
    failing_as_write,
    raise_if_damaged,
)
from paceline.storage._uploads import (
    BackgroundCalls,
    ShardUpload,
    UploadLimits,
    naming_object,
    stored_before,
)

# Short lifetime of cached records: removals by other processes meanwhile go unnoticed.
_RECENT_S = 1.0
# On Linux, the other clocks stand still while a machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class RecentRecords:
    """Keep the records of ranks for a second after they were put or read; for any thread."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[float, _checkpoint_files.ShardDone]] = {}

    def note(self, uuid: str, done: _checkpoint_files.ShardDone) -> None:
        """Remember a record known to be in the store now."""
        now = time.clock_gettime(_CLOCK)
        recent = {key: seen for key, seen in self._seen.copy().items() if now - seen[0] < _RECENT_S}
        self._seen = {**recent, (uuid, done.rank): (now, done)}

    def find(self, uuid: str, rank: int) -> _checkpoint_files.ShardDone | None:
        """Return a rank's record if known to be in the store a moment ago."""
        seen_s, done = self._seen.get((uuid, rank), (0.0, None))
        return done if time.clock_gettime(_CLOCK) - seen_s < _RECENT_S else None

    def forget(self, uuid: str) -> None:
        """Forget the records of a checkpoint."""
        self._seen = {key: seen for key, seen in self._seen.copy().items() if key[0] != uuid}


class StoredObject(NamedTuple):
    """Object in a store: key, size in bytes, and last change in seconds since the epoch.

    The size counts the bytes read. Times are by the clock of the store.
    The mark, such as an ETag, changes with the content; empty where the store has none.
    """

    key: str
    size: int
    changed: float
    mark: str = ""


# Before the UUIDs of checkpoints that are not whole. Each is the key of an object with the seconds
# that may pass without a sign of the writer.
_OPEN = ".open/"
# Before the keys of objects that are put to learn the time of the store.
_CLOCK_PREFIX = ".clock/"


class OpenMarkers:
    """Marks of unfinished checkpoints: writing or deleting them has begun and not ended.

    Others may keep UUIDs in the same store: only a marked UUID is a leftover.

    Args:
        store: The store.
    """

    def __init__(self, store: "ObjectStorage") -> None:
        self._store = store
        self._now: float | None = None

    def add(self, uuid: str) -> None:
        """Mark a checkpoint, before its first file is sent or removed."""
        # Some stores report the time of the first part as the time of a file.
        limit_s = 2 * UploadLimits.from_environment().file_s
        self._store._put_data(self.key(uuid), f"{limit_s:g}".encode())

    def key(self, uuid: str) -> str:
        """Return the key of a checkpoint's mark."""
        return f"{_OPEN}{uuid}"

    def all(self) -> dict[str, StoredObject]:
        """Return the marks by UUID, sorted."""
        return {each.key.removeprefix(_OPEN): each for each in sorted(self._store.objects(_OPEN))}

    def is_left(
        self, mark: StoredObject, stored: Sequence[StoredObject], older_than_s: float
    ) -> bool:
        """Return whether a checkpoint has no writer any more, so its removal is safe.

        Args:
            mark: The mark of the checkpoint.
            stored: Its objects.
            older_than_s: How many seconds must have passed since the last write; if above 0, at
                least as many as the mark says.
        """
        if older_than_s <= 0:
            return True
        changed = max(each.changed for each in (mark, *stored))
        return self._time_there() - changed >= max(older_than_s, self._silent_s(mark.key))

    def _silent_s(self, key: str) -> float:
        try:
            return float(self._store._read_whole(key) or 0)
        except ValueError:
            return 0.0  # a file of somebody else

    def _time_there(self) -> float:
        """Return the store's time: its clock stamps the changes of objects."""
        if self._now is None:
            key = f"{_CLOCK_PREFIX}{uuid4()}"
            self._store._put_data(key, b"")
            # Clock objects of killed sweeps: they are listed, and removed, together with ours.
            there = {each.key: each for each in self._store.objects(_CLOCK_PREFIX)}
            with suppress(CheckpointError):
                self._store.remove([*there])
            if key not in there:
                raise CheckpointError(
                    f"A store must list what was put, but there is no {key!r}: the age of its"
                    " leftovers is not known."
                )
            self._now = there[key].changed
        return self._now


_CHUNK_BYTES = 8 * 1024 * 1024


class ObjectStorage(CheckpointStorage):
    """Keep each file of a checkpoint as an object with the key ``<uuid>/<path>``.

    Files pass through a temporary directory (TMPDIR). Implementers override the four abstract
    methods over keys, `url` and `from_url`; an object that was put must be there for all
    processes, as a whole, once `put` returns.
    """

    # The files up to this size are put several at once.
    _small_file_bytes = -1
    # How many large files are sent at once in the background; 0 for stores that are used by one
    # thread at a time.
    _large_files_at_once = 0

    @abstractmethod
    def put(self, key: str, file: Path) -> None:
        """Store a file's content under a key, replacing an existing object."""

    @abstractmethod
    def read(self, key: str, offset: int, size: int) -> bytes:
        """Return a piece of an object, shorter at its end.

        Raises:
            FileNotFoundError: There is no such object.
        """

    @abstractmethod
    def objects(self, prefix: str) -> Sequence[StoredObject]:
        """Return the objects with a key prefix."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; a key without an object is no error."""

    def read_unchanged(self, key: str, offset: int, size: int, mark: str) -> bytes:
        """Return a piece of an object with a mark; override this if the store can compare marks.

        Raises:
            FileNotFoundError: There is no such object.
            CheckpointCorruptError: It has another mark.
        """
        return self.read(key, offset, size)

    def chunks(self, key: str, size: int) -> Iterator[bytes | memoryview]:
        """Yield an object in pieces of about `size` bytes; override this if a single request can.

        Raises:
            FileNotFoundError: There is no such object.
        """
        offset = 0
        while data := self.read(key, offset, size):
            offset += len(data)
            yield data

    # ---- storing -------------------------------------------------------------------------

    @contextmanager
    def store_path(self, uuid: str, *, rank: int = 0) -> Iterator[Path]:
        """Yield a temporary directory; its files are uploaded at the end of the block."""
        try:
            with self.store_shard(uuid, rank) as path:
                yield path
        except FileExistsError:
            # The committed checkpoint is another one's, and stays.
            raise
        except BaseException as error:
            with suppress(CheckpointError):  # The next sweep removes the rest.
                if failing_store_of(error) is None:
                    self.discard(uuid)
            raise

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a temporary directory; its files are uploaded at the end of the block."""
        self._check_new(uuid, rank)
        upload = self._shard_upload(uuid, rank)
        try:
            with temporary_directory() as path:
                with (
                    _checkpoint_errors.durable_write_errors(uuid, path),
                    self._taking_pieces(path, upload),
                ):
                    yield path
                self._put_all(upload, path)
        except FileExistsError:
            # Another process has stored this part, whose files may have the same names.
            upload.stop()
            raise
        except BaseException:
            upload.stop()
            if upload.entries and not upload.has_failed:
                # Leftover objects after a failed removal: a later sweep removes them.
                with suppress(Exception):
                    self._remove_sent(upload)
            raise

    def _remove_sent(self, upload: ShardUpload) -> None:
        """Remove the sent files, unless another process has stored this shard meanwhile."""
        if self._read_done(upload.uuid, upload.rank) is None:
            self.remove([f"{upload.uuid}/{name}" for name in upload.entries])

    def _taking_pieces(self, directory: Path, upload: ShardUpload) -> AbstractContextManager[None]:
        """Return a context with `file_sender` active for a directory, in stores with a sender."""
        return nullcontext()

    def copy_in(self, uuid: str, source: Path, *, rank: int = 0) -> None:
        """Upload a directory's files; a link to a regular file is uploaded as its target."""
        source = Path(source)
        if not source.is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be stored from a directory, but got {str(source)!r}."
            )
        self._check_new(uuid, rank)
        self._put_all(self._shard_upload(uuid, rank), source, follow_links=True)

    def _shard_upload(self, uuid: str, rank: int) -> ShardUpload:
        return ShardUpload(self.url, uuid, rank, large_files_at_once=self._large_files_at_once)

    def _put_all(self, upload: ShardUpload, source: Path, *, follow_links: bool = False) -> None:
        """Upload a directory's files, wait for background uploads, then write the done file."""
        uuid, rank = upload.uuid, upload.rank
        names = _checkpoint_files.check_file_names(
            _checkpoint_files.list_files(source, follow_links=follow_links)
        )
        upload.check_new(names)
        num_files = upload.num_begun + len(names)

        def send(name: str) -> None:
            upload.send(name, partial(self._send, file=source / name), num_files)

        sizes = {name: (source / name).stat().st_size for name in names}
        small = [name for name in names if sizes[name] <= self._small_file_bytes]
        # The client sends the parts of a large file at once. Small files are sent several at once.
        for name in names:
            if sizes[name] > self._small_file_bytes:
                send(name)
        upload.send_together(small, send)
        upload.wait()
        faults.reach("storage.before_done")
        done = _checkpoint_files.ShardDone(rank=rank, files=dict(sorted(upload.entries.items())))
        with naming_object(uuid, rank, "the list of its files"):
            try:
                self._put_new(
                    f"{uuid}/{_checkpoint_files.done_name(rank)}",
                    _checkpoint_files.encode_with_checksum(done),
                )
            except FileExistsError as error:
                raise stored_before(uuid, rank) from error
        if self._keeps_writers_apart:
            self._recent.note(uuid, done)
        faults.reach("storage.after_done")

    def _send(self, key: str, file: Path, timeout_s: float) -> _checkpoint_files.FileEntry:
        """Store a file within a time, where the store has limits, and return size and digest."""
        entry = _checkpoint_files.digest_file(file)
        self.put(key, file)
        return entry

    def _put_new(self, key: str, data: bytes) -> None:
        """Store an object; in capable stores only if the key has no object yet.

        Raises:
            FileExistsError: There is one with other content.
        """
        self._put_data(key, data)

    def _put_data(self, key: str, data: bytes) -> None:
        with temporary_directory() as directory:
            path = directory / "data"
            path.write_bytes(data)
            self.put(key, path)

    @property
    def _keeps_writers_apart(self) -> bool:
        """Whether `_put_new` replaces no object of another process."""
        return False

    @cached_property
    def _recent(self) -> RecentRecords:
        return RecentRecords()

    def _check_new(self, uuid: str, rank: int) -> None:
        """Mark a checkpoint as begun, before its first file is sent.

        If there is such a checkpoint already, the next sweep removes the mark.
        """
        check_uuid(uuid)
        with (
            naming_object(uuid, rank, "the beginning"),
            BackgroundCalls(min(self._large_files_at_once, 1)) as calls,
        ):
            # Mark and listing at the same time: each is a round trip to the store.
            calls.start(partial(OpenMarkers(self).add, uuid))
            keys = {each.key for each in self.objects(f"{uuid}/")}
        if keys & {
            f"{uuid}/{_checkpoint_files.MANIFEST_NAME}",
            f"{uuid}/{_checkpoint_files.done_name(rank)}",
        }:
            raise stored_before(uuid, rank)

    def discard(self, uuid: str) -> None:
        """Remove the objects of a checkpoint without a manifest."""
        self._recent.forget(uuid)
        keys = [each.key for each in self.objects(f"{check_uuid(uuid)}/")]
        if f"{uuid}/{_checkpoint_files.MANIFEST_NAME}" not in keys:
            self.remove([*keys, OpenMarkers(self).key(uuid)])

    def _read_done(self, uuid: str, rank: int) -> _checkpoint_files.ShardDone | None:
        recent = self._recent.find(uuid, rank)
        if recent is not None:
            return recent
        data = self._read_whole(f"{uuid}/{_checkpoint_files.done_name(rank)}")
        if data is None:
            return None
        done = _checkpoint_files.decode_done(data, uuid, rank)
        if self._keeps_writers_apart:
            self._recent.note(uuid, done)
        return done

    def _write_manifest(self, manifest: _checkpoint_files.Manifest) -> None:
        key = f"{manifest.uuid}/{_checkpoint_files.MANIFEST_NAME}"
        self._check_stored(manifest)
        faults.reach("storage.before_manifest")
        try:
            self._put_new(key, _checkpoint_files.encode_with_checksum(manifest))
        except FileExistsError as error:
            raise FileExistsError(
                f"A checkpoint must be committed once, but another process has committed"
                f" {manifest.uuid} in {self.url!r}."
            ) from error
        except BaseException:
            # Manifest possibly stored despite a lost answer: nobody would know of the commit.
            with suppress(CheckpointError):
                self.remove([key])
            raise
        faults.reach("storage.after_manifest")
        # Otherwise it is removed by the next sweep.
        with suppress(CheckpointError):
            self.remove([OpenMarkers(self).key(manifest.uuid)])

    def _check_stored(self, manifest: _checkpoint_files.Manifest) -> None:
        """Check the presence of all files: other processes may have removed some meanwhile."""
        uuid = manifest.uuid
        with failing_as_write(f"whether all files of checkpoint {uuid} are in {self.url!r} still"):
            there = {each.key: each.size for each in self.objects(f"{uuid}/")}
        gone = [n for n, entry in manifest.files.items() if there.get(f"{uuid}/{n}") != entry.size]
        if gone:
            # Objects stored after a sweep took the mark: no later sweep would find them.
            with suppress(CheckpointError):
                self.discard(uuid)
            raise CheckpointWriteError(
                f"The files of checkpoint {uuid} must stay in {self.url!r} until it is committed,"
                f" but {len(gone)} of {len(manifest.files)} were removed or replaced, such as"
                f" {gone[0]!r}."
            )

    # ---- restoring -----------------------------------------------------------------------

    def manifest(self, uuid: str) -> _checkpoint_files.Manifest:
        """Read the object ``manifest.json``."""
        data = self._read_whole(f"{check_uuid(uuid)}/{_checkpoint_files.MANIFEST_NAME}")
        if data is None:
            raise CheckpointNotFoundError(
                f"Checkpoint {uuid} must be committed in {self.url!r}, but there is none."
            )
        return _checkpoint_files.decode_manifest(data, uuid)

    def read_file(self, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file of a checkpoint."""
        return self.read(f"{check_uuid(uuid)}/{name}", offset, size)

    def problems(self, manifest: _checkpoint_files.Manifest) -> dict[str, str]:
        """Read every file, and compare its size and digest with the manifest's."""
        return self._fetched(manifest, None)

    @contextmanager
    def restore_path(
        self, uuid: str, *, selects: _checkpoint_files.Selector | None = None
    ) -> Iterator[Path]:
        """Yield a temporary directory with verified copies of the files."""
        with temporary_directory() as path:
            self.download(uuid, path, selects=selects)
            yield path

    def download(
        self, uuid: str, target: Path, *, selects: _checkpoint_files.Selector | None = None
    ) -> _checkpoint_files.Manifest:
        """Copy the files and compare the bytes read with the manifest."""
        manifest = self.manifest(uuid).selected(selects)
        raise_if_damaged(uuid, self._fetched(manifest, Path(target)))
        return manifest

    def _fetched(self, manifest: _checkpoint_files.Manifest, target: Path | None) -> dict[str, str]:
        """Read all files, into a directory if given, and return their problems by name."""
        problems = {}
        for name, entry in manifest.files.items():
            path = None if target is None else target / name
            try:
                found = self._fetch(f"{manifest.uuid}/{name}", path)
            except FileNotFoundError:
                problems[name] = "is missing"
                continue
            if found != entry:
                problems[name] = entry.difference(found)
        return problems

    def _fetch(self, key: str, path: Path | None) -> _checkpoint_files.FileEntry:
        hasher, size = xxhash.xxh3_128(), 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if path is None else path.open("wb") as file:
            for data in self.chunks(key, _CHUNK_BYTES):
                hasher.update(data)
                size += len(data)
                if file is not None:
                    file.write(data)
        return _checkpoint_files.FileEntry(size, hasher.hexdigest())

    def _read_whole(self, key: str) -> bytes | None:
        try:
            return b"".join(self.chunks(key, _CHUNK_BYTES))
        except FileNotFoundError:
            return None

    def put_file(self, name: str, file: Path) -> None:
        """Upload a file outside of checkpoints."""
        self.put(name, file)

    def probe(self) -> None:
        """Put, read and remove an object that a sweep would remove as well."""
        key, data = f"{_CLOCK_PREFIX}{uuid4()}", bytes(PROBE_BYTES)
        self._put_data(key, data)
        if self.read(key, 0, len(data)) != data:
            raise CheckpointError(f"A store must give back what was put, but {key!r} is not that.")
        self.remove([key])

    # ---- removing ------------------------------------------------------------------------

    def delete(self, uuid: str) -> None:
        """Remove the manifest, then the files."""
        if self._read_whole(f"{check_uuid(uuid)}/{_checkpoint_files.MANIFEST_NAME}") is None:
            raise CheckpointNotFoundError(
                f"Checkpoint {uuid} must be committed in {self.url!r} to be deleted, but there is"
                " none."
            )
        # Mark before the removal: a sweep completes an interrupted deletion.
        OpenMarkers(self).add(uuid)
        self.remove([f"{uuid}/{_checkpoint_files.MANIFEST_NAME}"])
        faults.reach("storage.after_manifest_deleted")
        self.discard(uuid)

    def replace_manifest(self, manifest: _checkpoint_files.Manifest) -> None:
        """Replace the manifest, then remove the objects no longer named there."""
        self._put_data(
            f"{manifest.uuid}/{_checkpoint_files.MANIFEST_NAME}",
            _checkpoint_files.encode_with_checksum(manifest),
        )
        faults.reach("storage.after_manifest_replaced")
        self.remove([f"{manifest.uuid}/{name}" for name in manifest.deleted])

    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove marked checkpoints without a manifest and without recent changes."""
        swept = []
        markers = OpenMarkers(self)
        for uuid, mark in markers.all().items():
            if among is not None and uuid not in among:
                continue
            stored = self.objects(f"{uuid}/")
            if f"{uuid}/{_checkpoint_files.MANIFEST_NAME}" in {each.key for each in stored}:
                # A crash right after the commit left the mark.
                self.remove([markers.key(uuid)])
            elif markers.is_left(mark, stored, older_than_s):
                self.discard(uuid)
                swept.append(uuid)
        return swept

    def list(self) -> UuidList:
        """Return the UUIDs of the checkpoints with a manifest."""
        split = (each.key.partition("/") for each in self.objects(""))
        return sorted(uuid for uuid, _, name in split if name == _checkpoint_files.MANIFEST_NAME)
