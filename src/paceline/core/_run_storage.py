"""Checkpoint storage of a run: named by a script, agreed between ranks; states in memory."""

import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from paceline._base.exceptions import text_of
from paceline._base.files import write_atomically
from paceline._base.run_directory import RunDirectory, RunInfo
from paceline._base.run_memory import own_run_memory
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import DistributedPeerError
from paceline.core._launcher_place import launched_place
from paceline.core._read_runs import moved_storage, read_checkpoints
from paceline.storage import _checkpoint_files
from paceline.storage._checkpoint_errors import CheckpointError
from paceline.storage._checkpoint_storage import CheckpointStorage, check_uuid, new_uuid
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_from_url import storage_from

logger = logging.getLogger(__name__)


GivenStorage: TypeAlias = CheckpointStorage | str | Path | Mapping[str, Any] | None

# Path keys in the mappings accepted by `storage_from`.
_PATH_NAMES = ("host_path", "path", "container_path")


def given_storage(spec: GivenStorage) -> CheckpointStorage | None:
    """Return the storage given by a script; None for the run's own storage.

    Raises:
        TypeError: `spec` has another type.
        ValueError: It names no storage, or a path where no directory can be made.
    """
    storage = spec if spec is None or isinstance(spec, CheckpointStorage) else storage_from(spec)
    if storage is not None and storage.local_root is not None:
        _check_directory(storage.local_root)
    return storage


def _check_directory(root: Path) -> None:
    """Raise ValueError early if a storage's directory neither exists nor can be created."""
    place = next((each for each in (root, *root.parents) if os.path.lexists(each)), None)
    if place is None or place.is_dir():
        return
    if place.is_symlink():
        found = f"a link to {os.readlink(place)!r}, where no directory is"
        hint = "make the directory that it names, mount its disk, or remove the link"
    else:
        found, hint = "a file", "remove it, or name another path"
    raise ValueError(
        f"`checkpoint_storage` must be a directory, or a path where one can be made, but"
        f" {str(place)!r} is {found}. Hint: {hint}."
    )


def check_given_storage(spec: GivenStorage, info: RunInfo) -> None:
    """Refuse a relative path under a master: the directory would go with the attempt.

    Args:
        spec: The script's value.
        info: The run.

    Raises:
        ValueError: It is a relative path, and the run is a trial of a master.
    """
    path: object = spec
    if isinstance(spec, Mapping):
        path = next((spec[name] for name in _PATH_NAMES if spec.get(name)), None)
    is_path = isinstance(path, Path) or (isinstance(path, str) and "://" not in path)
    if not info.cluster_id or not is_path or os.path.isabs(os.path.expanduser(str(path))):
        return
    raise ValueError(
        "`checkpoint_storage` must be an absolute path under a master, which deletes the"
        f" attempt's directory afterwards, but got {str(path)!r}. Hint: give an absolute path,"
        " or leave it out to use the experiment's storage."
    )


class NodeStorage(DirectoryStorage):
    """Directory of a single node, for checkpoints stored jointly by ranks on several nodes.

    Each rank stores its files on its own node. The done files of other nodes' ranks reach the chief
    through the store of the ranks. So the chief commits as usual, with a manifest that names the
    files of all nodes. The runners of the nodes send the files to the master.

    Args:
        root: The directory on this node.
        distributed: Where the ranks meet.
        owner: The `owner` of `DirectoryStorage`.
    """

    def __init__(
        self, root: Path, distributed: DistributedContext, owner: int | None = None
    ) -> None:
        super().__init__(root, owner=owner)
        self._distributed = distributed

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a directory for this rank's files; afterwards send their list to the chief."""
        with super().store_shard(uuid, rank) as path:
            yield path
        if self._distributed.cross_rank:
            text = (self.root / uuid / _checkpoint_files.done_name(rank)).read_bytes()
            self._distributed.put(f"{uuid}/{rank}", text)

    def _read_done(self, uuid: str, rank: int) -> _checkpoint_files.ShardDone | None:
        done = super()._read_done(uuid, rank)
        if done is not None or self._distributed.rank:
            return done
        text = self._distributed.take(f"{uuid}/{rank}")
        if text is None:
            return None
        done = _checkpoint_files.decode_done(text, uuid, rank)
        # The runner sends it with the manifest.
        write_atomically(self.root / uuid / _checkpoint_files.done_name(rank), text)
        return done


# A network file system may show another machine's file late.
_PATIENCE_S = 15.0
_LOOK_INTERVAL_S = 0.05


def check_shared_storage(storage: CheckpointStorage, distributed: DistributedContext) -> None:
    """Refuse a directory not visible to all machines; all ranks call together.

    Their checkpoints would never be complete, which would show only after the training.

    Args:
        storage: Where all ranks are to store their parts of checkpoints.
        distributed: Where the ranks meet.

    Raises:
        ValueError: Some ranks do not see the chief's file there.
    """
    root = storage.local_root
    if distributed.cross_size == 1 or root is None or isinstance(storage, NodeStorage):
        return
    is_chief = distributed.rank == 0
    mark = distributed.broadcast(_write_mark(root) if is_chief else None)
    try:
        seen = distributed.allgather(mark is None or _is_seen(root / mark))
    finally:
        if is_chief and mark is not None:
            with suppress(OSError):
                (root / mark).unlink()
    blind = [rank for rank, has_seen in enumerate(seen) if not has_seen]
    if blind:
        raise ValueError(
            f"`checkpoint_storage` must be a directory that all machines see, but rank(s)"
            f" {', '.join(map(str, blind))} do not see in {str(root)!r} what rank 0 writes there."
            " Hint: give the path of a file system that is mounted on all of them, or the URL of an"
            " object store."
        )


def _write_mark(root: Path) -> str | None:
    """Return the name of a mark file; None if not writable (a later save raises the error)."""
    name = f".paceline-{uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / name).touch(exist_ok=False)
    except OSError:
        return None
    return name


def _is_seen(path: Path) -> bool:
    # NFS shows another machine's new file only after its attribute cache expires.
    deadline = time.monotonic() + _PATIENCE_S
    while not _is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_INTERVAL_S)
    return True


def _is_there(path: Path) -> bool:
    """Return whether a file exists, after listing its directories to bypass NFS caches."""
    for directory in (path.parent.parent, path.parent):
        # Opening a directory makes NFS forget that something was not there. Not everyone may.
        with suppress(OSError):
            os.listdir(directory)
    return os.path.exists(path)


@contextmanager
def failing_together(distributed: DistributedContext, must: str) -> Iterator[None]:
    """Raise on every rank if the block raises on any rank.

    Args:
        distributed: Where the ranks meet.
        must: The condition, as the beginning of a sentence for the other ranks.

    Raises:
        DistributedPeerError: The block of another rank has raised; the message has its error.
    """
    own: BaseException | None = None
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        # Errors include Ctrl-C: a program may catch it and continue in step with the other ranks.
        own = error
    by_rank = distributed.allgather(None if own is None else (type(own).__name__, text_of(own)))
    if own is not None:
        raise own
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            name, text = failure
            raise DistributedPeerError(
                f"{must}, but rank {rank} failed: {name}: {text}", error_type=name
            )


def merged_metadata(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of all ranks merged into a single dictionary, in rank order.

    Raises:
        ValueError: Two ranks have different values for a key; dictionaries are merged.
    """
    merged: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        _merge_sharded_metadata(merged, part, rank, "")
    return merged


def _merge_sharded_metadata(
    merged: dict[str, Any], part: Mapping[str, Any], rank: int, prefix: str
) -> None:
    for key, value in part.items():
        known = merged.setdefault(key, value if not isinstance(value, Mapping) else {})
        if isinstance(value, Mapping) and isinstance(known, dict):
            _merge_sharded_metadata(known, value, rank, f"{prefix}{key}.")
        elif known != value:
            raise ValueError(
                f"The ranks must agree on the `metadata`, but {prefix + key!r} is {value!r} on rank"
                f" {rank} and {known!r} on an earlier one. Hint: give it on one rank only."
            )


def rank_source(
    distributed: DistributedContext,
    source: str | os.PathLike[str] | None,
    selector: _checkpoint_files.Selector | None,
) -> Path | None:
    """Return the directory uploaded by this rank; None if another rank uploads the same files.

    Ranks that give the same directory bring it once, unless they select files.

    Raises:
        ValueError: No rank has a directory, or this one has only a selector.
        NotADirectoryError: It is none.
    """
    with failing_together(distributed, "With `shard=True` all ranks must give a directory or None"):
        path = None if source is None else Path(source)
        check_selector(selector)
        if path is None and selector is not None:
            raise ValueError("`selector` must come with a `ckpt_dir`, but that is None.")
        if path is not None and not path.is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be uploaded from a directory, but got {str(path)!r}."
            )
    own = None
    if path is not None:
        facts = path.stat()
        # Identity of the directory; with a selector, each rank's choice of files counts.
        own = (socket.gethostname(), facts.st_dev, facts.st_ino, distributed.rank * bool(selector))
    by_rank = distributed.allgather(own)
    if by_rank == [None] * distributed.size:
        raise ValueError("`ckpt_dir` must be a directory on one rank at least, but all have None.")
    return path if own is not None and by_rank.index(own) == distributed.rank else None


def check_selector(selector: object) -> None:
    """Refuse a selector neither None nor callable.

    Raises:
        TypeError: It is neither None nor a function.
    """
    if selector is not None and not callable(selector):
        raise TypeError(f"`selector` must be a function, but got {selector!r}.")


# Grace period of object stores: requests of a killed process may still complete this long.
_LANDING_S = 2.0


def discard_unfinished(run: RunDirectory) -> None:
    """Remove checkpoints begun but not committed or recorded by a run's ended processes.

    Checkpoints whose deletion they have begun are removed completely. Call this only once all of
    these processes have ended.

    Args:
        run: The run directory of the processes.
    """
    begun = run.begun_checkpoints()
    recorded = {stored.uuid for stored in read_checkpoints(run)} if begun else set()
    # Part of another process's checkpoint: the record may be in another run directory.
    parts = run.begun_checkpoints(is_part=True)
    if parts and run.read_info().storage_per_node:
        # The runner of this node sends them, and learns whether the chief has committed them.
        parts = {}
    # Notes in a copied run directory: they mean the original's work, in the original's storage.
    moved = moved_storage(run, run.read_info()) if parts or begun else {}
    unfinished = {uuid: moved.get(url, url) for uuid, url in {**parts, **begun}.items()}
    found = _discard(unfinished, {*begun} - recorded)
    left = {uuid: url for uuid, url in unfinished.items() if uuid in found and "://" in url}
    if left:
        time.sleep(_LANDING_S)
        found = (found - {*left}) | _discard(left, {*begun} - recorded)
    for uuid in found:
        run.forget_checkpoint(uuid)


def _discard(unfinished: Mapping[str, str], unrecorded: set[str]) -> set[str]:
    """Remove incomplete checkpoints, and complete checkpoints missing from every journal.

    Args:
        unfinished: The URLs of their storages by UUID.
        unrecorded: The UUIDs of those that no process can know any more.

    Returns:
        The UUIDs of those that could be removed, or looked at.
    """
    done = set()
    for uuid, url in unfinished.items():
        try:
            storage = storage_from(url).in_a_hurry()
            storage.discard(uuid)
            if uuid in unrecorded and storage.exists(uuid):
                # The chief was killed between the commit and the record: no journal has it.
                storage.delete(uuid)
        except (OSError, ValueError, CheckpointError) as error:
            logger.warning("The unfinished checkpoint %s cannot be removed: %s", uuid, error)
            continue
        done.add(uuid)
    return done


def run_origin(run: RunDirectory) -> str:
    """Return the run's attempt in a master's terms; empty without a master."""
    info = run.read_info()
    if info.trial is None or not info.cluster_id:
        return ""
    return _checkpoint_files.origin_of(info.cluster_id, info.trial.trial_id, info.attempt)


def new_run_uuid(run: RunDirectory) -> str:
    """Return a UUID for a new checkpoint; a master accepts the UUID from this trial alone."""
    info = run.read_info()
    return new_uuid(info.cluster_id, None if info.trial is None else info.trial.trial_id)


def memory_storage(run_id: str) -> DirectoryStorage | None:
    """Return the storage of a run's states in memory; None if no parent owns such memory."""
    try:
        path = own_run_memory(is_alone=launched_place() is None)
    except BlockingIOError:
        # Another process of the attempt uses it.
        return None
    except OSError as error:
        logger.warning("No state is kept in memory: %s.", error)
        return None
    if path is None:
        return None
    owner = path.stat().st_uid
    return DirectoryStorage(path / check_uuid(run_id), has_one_owner=True, owner=owner)


def newest_in_memory(run_id: str, steps_completed: int) -> tuple[str | None, int]:
    """Return the newest whole state in memory, and its step; remove all others there.

    Args:
        run_id: The run; states of other runs are never looked at.
        steps_completed: The step of the newest checkpoint in the storage.

    Returns:
        None and `steps_completed` if none in memory is newer.
    """
    storage = memory_storage(run_id)
    newest, steps = None, steps_completed
    if storage is None or not storage.root.is_dir():
        return newest, steps
    by_step = []
    for uuid in storage.list():
        try:
            by_step.append((storage.manifest(uuid).metadata["steps_completed"], uuid))
        except (CheckpointError, OSError) as error:
            logger.warning("Passing over a state in memory: %s", error)
    # The newest one alone is read as a whole, as the ranks wait for it.
    for found, uuid in sorted(by_step, reverse=True):
        if found <= steps_completed or newest is not None:
            break
        try:
            storage.verify(uuid)
            newest, steps = uuid, found
        except (CheckpointError, OSError) as error:
            logger.warning("Passing over a state in memory: %s", error)
    for path in storage.root.iterdir():
        if path.name != newest:
            # What a killed process has left takes the room of the next state.
            shutil.rmtree(path, ignore_errors=True)
    return newest, steps
