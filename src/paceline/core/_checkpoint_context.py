"""Checkpoints of the core API: stored, restored, and downloaded by the ranks of a node together."""

import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import (
    MAX_METADATA_BYTES,
    CheckpointFilesDeleted,
    CheckpointStored,
)
from paceline._base.run_directory import RunDirectory
from paceline.core._arguments import MAX_STEPS, DownloadMode, plain_json
from paceline.core._attempt_journal import CHECKPOINT, ScriptTimes, record_store_state
from paceline.core._background_checkpoints import (
    CheckpointParts,
    StoreFailures,
    commit_checkpoint,
    commit_in_memory,
    delete_checkpoint,
)
from paceline.core._distributed_context import DistributedContext
from paceline.core._node_memory import NodeMemory, NodeParts
from paceline.core._run_storage import (
    check_selector,
    check_shared_storage,
    failing_together,
    merged_metadata,
    new_run_uuid,
    rank_source,
)
from paceline.storage._checkpoint_errors import (
    CheckpointError,
    CheckpointNotFoundError,
    failing_store_of,
)
from paceline.storage._checkpoint_files import Selector, copy_files, glob_selector
from paceline.storage._checkpoint_storage import CheckpointStorage

logger = logging.getLogger(__name__)

_MUST = "With `LocalWorkersShareDownload` all ranks must "


class CheckpointDownload:
    """Reader of checkpoints from a storage, for a single rank or for a node's ranks together."""

    def __init__(self, storage: CheckpointStorage, distributed: DistributedContext) -> None:
        self._storage = storage
        self._distributed = distributed

    def restore_path(
        self, uuid: str, mode: DownloadMode, selector: Selector | None
    ) -> AbstractContextManager[Path]:
        """Return a context manager with a directory of verified files, to read only."""
        check_selector(selector)
        if _is_shared(mode):
            return self._restoring_together(uuid, selector)
        if selector is None:
            return self._storage.restore_path(uuid)
        return self._storage.restore_path(uuid, selects=selector)

    def download(
        self,
        uuid: str,
        ckpt_dir: str | os.PathLike[str],
        mode: DownloadMode,
        selector: Selector | None,
    ) -> None:
        """Copy files into a directory, and verify them."""
        check_selector(selector)
        target = Path(ckpt_dir)
        if _is_shared(mode):
            self._download_together(uuid, target, selector)
        elif selector is None:
            self._storage.download(uuid, target)
        else:
            self._storage.download(uuid, target, selects=selector)

    @contextmanager
    def _restoring_together(self, uuid: str, selector: Selector | None) -> Iterator[Path]:
        distributed = self._distributed
        wanted = self._wanted_by_node(uuid, selector)
        # Left on no rank before all have left the block.
        with ExitStack() as stack:
            found = None
            with failing_together(distributed, f"{_MUST}find the checkpoint"):
                if distributed.local_rank == 0:
                    restored = self._storage.restore_path(uuid, selects=wanted.__contains__)
                    found = str(stack.enter_context(restored))
            path = distributed.broadcast_local(found)
            assert path is not None
            with failing_together(distributed, f"{_MUST}end the block of `restore_path`"):
                yield Path(path)
            with failing_together(distributed, f"{_MUST}only read the files"):
                stack.close()

    def _download_together(self, uuid: str, target: Path, selector: Selector | None) -> None:
        distributed = self._distributed
        wanted = self._wanted_by_node(uuid, selector)
        given = distributed.allgather_local(os.path.abspath(target))
        with failing_together(distributed, f"{_MUST}find the checkpoint"):
            if len(set(given)) > 1:
                raise ValueError(
                    "`ckpt_dir` must be the same on all ranks of a node with"
                    f" `LocalWorkersShareDownload`, but got {', '.join(sorted(set(given)))}."
                    " Hint: pass `DownloadMode.NoSharedDownload`."
                )
            if distributed.local_rank == 0:
                self._storage.download(uuid, target, selects=wanted.__contains__)

    def _wanted_by_node(self, uuid: str, selector: Selector | None) -> set[str]:
        """Return the paths of the files selected by any rank of this node."""
        with failing_together(self._distributed, f"{_MUST}find the checkpoint"):
            names = list(self._storage.manifest(uuid).selected(selector).files)
        # Ranks may be given different checkpoints by mistake.
        by_rank = self._distributed.allgather_local((uuid, names))
        with failing_together(self._distributed, f"{_MUST}name the same checkpoint"):
            uuids = sorted({given for given, _ in by_rank})
            if len(uuids) > 1:
                raise ValueError(
                    "`uuid` must be the same on all ranks of a node with"
                    f" `LocalWorkersShareDownload`, but got {', '.join(uuids)}."
                )
        return {name for _, names in by_rank for name in names}


def _is_shared(mode: object) -> bool:
    if not isinstance(mode, DownloadMode):
        raise TypeError(f"`download_mode` must be a DownloadMode, but got {mode!r}.")
    return mode is DownloadMode.LocalWorkersShareDownload


class CheckpointContext:
    """Store checkpoints as a whole or not at all, and restore them after verifying every file.

    The chief stores and deletes; every rank may restore. With `shard=True` all ranks store
    together: each calls, and brings files of its own. `metadata` must hold the integer
    `steps_completed`: a restarted attempt resumes from it.
    """

    def __init__(
        self,
        *,
        run: RunDirectory,
        storage: CheckpointStorage,
        journal: JournalWriter,
        distributed: DistributedContext,
        latest: str | None,
        memory: CheckpointStorage | None = None,
        memory_state: str | None = None,
        times: ScriptTimes,
        on_committed: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._storage = storage
        self._journal = journal
        self._distributed = distributed
        self._memory = memory
        self._memory_state = memory_state
        self._times = times
        self._on_committed = on_committed
        self._committed = [] if latest is None else [latest]
        self._has_stored = False
        storage.watch(partial(record_store_state, journal, storage.url))

    @property
    def storage(self) -> CheckpointStorage:
        """Where the checkpoints are."""
        return self._storage

    @property
    def latest(self) -> str | None:
        """The UUID of the newest checkpoint known to this process, or None."""
        return self._committed[-1] if self._committed else None

    @property
    def to_resume(self) -> str | None:
        """The UUID of the newest state: one in memory until this process stores a newer one."""
        return self.latest if self._has_stored else self._memory_state or self.latest

    def is_in_memory(self, uuid: str) -> bool:
        """Return whether a UUID is that of the state in memory that this process resumes from."""
        return uuid == self._memory_state

    def _holding(self, uuid: str) -> CheckpointStorage:
        if self._memory is not None and self.is_in_memory(uuid):
            return self._memory
        return self._storage

    @contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Yield an empty directory to write a checkpoint's files to, and its UUID.

        Leaving the block commits the checkpoint; leaving it by an exception removes it.

        Args:
            metadata: JSON-able values, among them the integer `steps_completed`.
            shard: Whether all ranks store together. Each gets a directory of its own; the
                checkpoint holds the files of all, and the `metadata` of all, merged. The block
                ends on no rank before the checkpoint is committed.

        Raises:
            RuntimeError: This process is not the chief, without `shard`.
            TypeError: `metadata` is not JSON-able, `steps_completed` is no integer, or `shard` is
                neither True nor False.
            ValueError: `steps_completed` is missing, or not from 0 to 2**63 - 1, or ranks give
                different values.
            FileExistsError: Another rank has stored another file of the same name.
            DistributedPeerError: Another rank has failed; the message has its error.
            CheckpointWriteError: The files cannot be written, for example on a full disk.
        """
        if _is_shard(shard):
            with self._storing_shard(metadata) as (path, uuid):
                yield path, uuid
            return
        checked = self._prepare(metadata)
        uuid = new_run_uuid(self._run)
        with self._times.spent_on(CHECKPOINT), self._noted(uuid):
            with self._storage.store_path(uuid) as path:
                yield path, uuid
            self._commit(uuid, checked)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Store a copy of a directory as a checkpoint and return its UUID.

        Args:
            ckpt_dir: The directory; it stays as it is. With `shard`, None on ranks that bring no
                files; a directory that several ranks of a machine give is uploaded once.
            metadata: JSON-able values, among them the integer `steps_completed`.
            shard: Whether all ranks upload together, see `store_path`.
            selector: Called with the path of each file, relative to `ckpt_dir`, as ``a/b.txt``;
                tells whether to upload it.

        Raises:
            RuntimeError: This process is not the chief, without `shard`.
            NotADirectoryError: `ckpt_dir` is no directory.
            TypeError: `metadata` is not JSON-able, `steps_completed` is no integer, or `shard` is
                neither True nor False.
            ValueError: `steps_completed` is missing, or not from 0 to 2**63 - 1, or ranks give
                different values, or none gives a directory.
            FileExistsError: Another rank has stored another file of the same name.
            DistributedPeerError: Another rank has failed; the message has its error.
            CheckpointWriteError: The files cannot be written, for example on a full disk.
        """
        if _is_shard(shard):
            source = rank_source(self._distributed, ckpt_dir, selector)
            with self._storing_shard(metadata) as (path, uuid):
                if source is not None:
                    copy_files(source, path, selector)
            return uuid
        if ckpt_dir is None:
            raise ValueError("`ckpt_dir` must be a directory without `shard=True`, but is None.")
        checked = self._prepare(metadata)
        uuid = new_run_uuid(self._run)
        with self._times.spent_on(CHECKPOINT), self._noted(uuid):
            if selector is None:
                self._storage.copy_in(uuid, Path(ckpt_dir))
            else:
                with self._storage.store_path(uuid) as path:
                    copy_files(Path(ckpt_dir), path, selector)
            self._commit(uuid, checked)
        return uuid

    def restore_path(
        self,
        uuid: str,
        download_mode: DownloadMode = DownloadMode.NoSharedDownload,
        *,
        selector: Selector | None = None,
    ) -> AbstractContextManager[Path]:
        """Return a context manager for a directory with the verified files of a checkpoint.

        The files are read-only; `download` gives a copy that may be changed.

        Args:
            uuid: The checkpoint.
            download_mode: Whether the ranks of a node share one directory. With
                `LocalWorkersShareDownload` all ranks call, and the block ends on all together.
            selector: Called with the path of each file, relative to the checkpoint; tells whether
                this rank needs it. Others may be there too, and are not verified.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointCorruptError: Files are missing or altered, or were written to in the block,
                by a user whom permissions do not stop; the message names each.
            DistributedPeerError: Another rank that shares has failed; the message has its error.
            TypeError: `download_mode` is none, or `selector` is no function.
            ValueError: Ranks of a node that share name different checkpoints.
        """
        fetching = CheckpointDownload(self._holding(uuid), self._distributed)
        return fetching.restore_path(uuid, download_mode, selector)

    def download(
        self,
        uuid: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.NoSharedDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint's files into a directory, and verify them.

        Args:
            uuid: The checkpoint.
            ckpt_dir: The directory; it is made if it is not there.
            download_mode: Whether one rank of each node copies for all of its node. With
                `LocalWorkersShareDownload` all ranks call.
            selector: Called with the path of each file; tells whether to copy it.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointCorruptError: Files are missing or altered; the message names each.
            DistributedPeerError: Another rank that shares has failed; the message has its error.
            TypeError: `download_mode` is none, or `selector` is no function.
            ValueError: Ranks of a node that share give different directories or checkpoints.
        """
        fetching = CheckpointDownload(self._holding(uuid), self._distributed)
        fetching.download(uuid, ckpt_dir, download_mode, selector)

    def get_metadata(self, uuid: str) -> dict[str, Any]:
        """Return the metadata stored with a checkpoint.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
        """
        return self._holding(uuid).manifest(uuid).metadata

    def delete(self, uuid: str, globs: Sequence[str] | None = None) -> None:
        """Delete a checkpoint, or some of its files.

        A checkpoint that has lost files keeps its UUID and its metadata. A run no longer resumes
        from it by itself.

        Args:
            uuid: The checkpoint.
            globs: Patterns of the files to delete, as in a ``.gitignore``: "optimizer_*" or
                "deep/**". If they match all files, the checkpoint is deleted. None for all.

        Raises:
            RuntimeError: This process is not the chief.
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointWriteError: The new manifest cannot be written; nothing is deleted.
            TypeError: `globs` is no list of patterns.
        """
        self._check_chief("delete")
        selects = None if globs is None else glob_selector(globs)
        try:
            names = self._storage.manifest(uuid).files
        except CheckpointNotFoundError:
            if uuid not in self._run.begun_checkpoints():
                raise
            # The storage has failed while it was being deleted.
            names = {}
        if selects is not None and not all(map(selects, names)):
            if any(map(selects, names)):
                manifest = self._storage.delete_files(uuid, selects)
                self._forget(uuid)
                self._journal.append(
                    CheckpointFilesDeleted(
                        time=time.time(), uuid=uuid, resources=manifest.resources
                    )
                )
            else:
                logger.warning("No file of checkpoint %s is deleted: none matches %s.", uuid, globs)
            return
        delete_checkpoint(self._run, self._storage, self._journal, uuid)
        self._forget(uuid)

    def _forget(self, uuid: str) -> None:
        """Remove a checkpoint from those to resume from."""
        self._committed = [other for other in self._committed if other != uuid]

    def parts(self, on_committed: Callable[[CheckpointStored], None]) -> CheckpointParts:
        """Return the background store of checkpoints for all ranks; used by trainers.

        All ranks call this together.

        Args:
            on_committed: Called on the chief with the record of each that was committed, in any
                thread.

        Raises:
            ValueError: The ranks are on several machines that do not all see the storage.
        """
        check_shared_storage(self._storage, self._distributed)

        def commit(uuid: str, metadata: dict[str, Any]) -> None:
            checked, num_shards = _checked_metadata(metadata), self._distributed.size
            on_committed(self._commit(uuid, checked, num_shards=num_shards))

        return CheckpointParts(
            self._run,
            self._storage,
            rank=self._distributed.rank,
            world_size=self._distributed.size,
            commit=commit,
        )

    def are_reports_written(self) -> bool:
        """Return whether this rank's reports so far outlive its process."""
        return self._journal.flush(0.0)

    def memory_parts(self, failures: StoreFailures) -> CheckpointParts | None:
        """Return the background store of states in memory; None if no parent owns such memory.

        Args:
            failures: What decides whether training continues.
        """
        memory, size = self._memory, self._distributed.size
        distributed = self._distributed
        is_one = distributed.cross_size == 1
        # Also without memory here, as other nodes may have some.
        nodes = () if is_one else distributed.allgather(distributed.cross_rank)
        if memory is None:
            return None

        def commit(uuid: str, metadata: dict[str, Any]) -> None:
            checked = _checked_metadata(metadata)
            commit_in_memory(memory, self._journal, uuid, checked, num_shards=size)

        if isinstance(memory, NodeMemory):
            return NodeParts(memory, distributed, nodes, commit, failures)
        rank = distributed.rank
        return CheckpointParts(
            None, memory, rank=rank, world_size=size, commit=commit, failures=failures
        )

    def _prepare(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        self._check_chief("store")
        return _checked_metadata(metadata)

    @contextmanager
    def _storing_shard(self, metadata: Mapping[str, Any] | None) -> Iterator[tuple[Path, str]]:
        distributed, storage = self._distributed, self._storage
        with failing_together(
            distributed, "With `shard=True` all ranks must give plain `metadata`"
        ):
            own = plain_json({} if metadata is None else metadata)
        is_chief = distributed.rank == 0
        parts = distributed.allgather((new_run_uuid(self._run) if is_chief else "", own))
        # UUID of the chief: every rank draws an id, only the first rank's counts.
        uuid = parts[0][0]
        checked = _checked_metadata(merged_metadata([part for _, part in parts]))
        with self._times.spent_on(CHECKPOINT), self._noted(uuid) if is_chief else nullcontext():
            try:
                with (
                    failing_together(
                        distributed, "With `shard=True` all ranks must store their files"
                    ),
                    storage.store_shard(uuid, distributed.rank) as path,
                ):
                    yield path, uuid
                with failing_together(
                    distributed, "The chief must commit what all ranks have stored"
                ):
                    if is_chief:
                        self._commit(uuid, checked, num_shards=distributed.size)
            except BaseException as error:
                with suppress(CheckpointError):  # The next sweep removes the rest.
                    if is_chief and failing_store_of(error) is None:
                        storage.discard(uuid)
                raise
        if not is_chief:
            self._note_committed(uuid)

    @contextmanager
    def _noted(self, uuid: str) -> Iterator[None]:
        """Note a checkpoint in the run directory while unfinished, for cleanup after a kill."""
        self._run.note_checkpoint(uuid, self._storage.url)
        try:
            yield
        finally:
            self._run.forget_checkpoint(uuid)

    def _commit(
        self, uuid: str, metadata: dict[str, Any], *, num_shards: int = 1
    ) -> CheckpointStored:
        record = commit_checkpoint(
            self._run, self._storage, self._journal, uuid, metadata, num_shards=num_shards
        )
        self._note_committed(uuid)
        self._times.stored(metadata["steps_completed"])
        self._on_committed()
        return record

    def _note_committed(self, uuid: str) -> None:
        self._committed.append(uuid)
        self._has_stored = True

    def _check_chief(self, verb: str) -> None:
        rank = self._distributed.rank
        if rank != 0:
            hint = ", or have all ranks store together by `shard=True`" if verb == "store" else ""
            raise RuntimeError(
                f"Only the chief may {verb} checkpoints, but rank {rank} tried to."
                f" Hint: guard the call by `if context.distributed.rank == 0:`{hint}."
            )


def _is_shard(shard: object) -> bool:
    if not isinstance(shard, bool):
        raise TypeError(f"`shard` must be True or False, but got {shard!r}.")
    return shard


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a plain JSON copy of the metadata, with `steps_completed` checked."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"`metadata` must be a dictionary, but got {metadata!r}.")
    if metadata is None or "steps_completed" not in metadata:
        raise ValueError(
            "`metadata` must hold 'steps_completed', the number of batches that training has"
            f" completed, but got {metadata!r}."
        )
    steps = metadata["steps_completed"]
    if isinstance(steps, bool) or not hasattr(steps, "__index__"):
        raise TypeError(
            f"`metadata['steps_completed']` must be an integer, but got {steps!r}"
            f" ({type(steps).__name__})."
        )
    if operator.index(steps) < 0:
        raise ValueError(f"`metadata['steps_completed']` must be at least 0, but got {steps}.")
    if operator.index(steps) > MAX_STEPS:
        raise ValueError(
            f"`metadata['steps_completed']` must be below 2**63, but got {steps}."
            " Hint: it counts batches, not samples or time."
        )
    plain = plain_json({**metadata, "steps_completed": operator.index(steps)})
    size = len(msgspec.json.encode(plain))
    if size > MAX_METADATA_BYTES:
        raise ValueError(
            f"`metadata` must have {MAX_METADATA_BYTES} bytes as JSON at most, but has {size}."
            " Hint: keep large things in a file of the checkpoint."
        )
    return plain
