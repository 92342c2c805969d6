"""States in memory of runs on several nodes: each node's files, copied to the next node."""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline import faults
from paceline._base.run_directory import RunDirectory
from paceline.core._background_checkpoints import (
    NEWEST_REPORT,
    CheckpointParts,
    StoreFailures,
    delete_others,
)
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import DistributedError
from paceline.core._read_runs import read_history
from paceline.core._run_opening import OpenedRun, steps_up_to
from paceline.core._run_storage import NodeStorage, memory_storage
from paceline.storage import _checkpoint_files
from paceline.storage._checkpoint_errors import CheckpointError, CheckpointWriteError
from paceline.storage._checkpoint_storage import check_uuid
from paceline.storage._directory_storage import DirectoryStorage

logger = logging.getLogger(__name__)

# The store of the ranks refuses values of 8 MB.
_CHUNK_BYTES = 4 * 1024 * 1024
# How many chunks of a stream may wait in the store for their reader.
_WINDOW = 4
_PAUSE_S = 0.002
# How often a node that waits looks whether another one has given up.
_LOOK_S = 0.2


class NodeMemory(NodeStorage):
    """Storage of a node's states in memory, whose files go to other nodes and come from them.

    The manifest of a state is on each node, and lists the files of all nodes. A node holds those
    of its own ranks and of the ranks of the node before it. Only the first rank of a node sends
    and receives. Chunks pass through the store of the ranks, on node 0.

    Args:
        root: The directory on this node.
        distributed: Where the ranks meet.
    """

    def __init__(self, root: Path, distributed: DistributedContext) -> None:
        super().__init__(root, distributed, os.geteuid())
        self.node = distributed.cross_rank
        self._is_stopped = threading.Event()
        self._sent_s = 0.0

    def begin(self) -> None:
        """Allow transfers, also after those of an earlier training were stopped."""
        self._is_stopped.clear()

    def stop(self) -> None:
        """End transfers under way on this node."""
        self._is_stopped.set()

    def give_up(self, uuid: str) -> None:
        """End transfers of a state on all nodes, as one of them has failed."""
        self.stop()
        # Other nodes see a connection that broke by themselves.
        with suppress(DistributedError):
            self._distributed.put(f"{uuid}/given-up", b"")

    def files_of(self, uuid: str, rank: int) -> list[str]:
        """Return the files of a rank of this node that has stored its part."""
        done = self._done_of(uuid, rank)
        return [] if done is None else [*done.files]

    def held(self, uuid: str) -> dict[str, int]:
        """Return the sizes of the files of a state on this node."""
        root = self.root / check_uuid(uuid)
        paths = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        sizes = {path.relative_to(root).as_posix(): path.stat().st_size for path in paths}
        # A rank that was killed leaves its files in a directory of its own.
        return {
            n: s
            for n, s in sizes.items()
            if not _checkpoint_files.is_reserved(n) and not n.startswith(".rank-")
        }

    def adopt(self, data: bytes, uuid: str) -> None:
        """Take the manifest of a state from another node."""
        self._write_manifest(_checkpoint_files.decode_manifest(data, uuid))

    def send(self, node: int, uuid: str, names: Sequence[str]) -> None:
        """Send files of a state to another node.

        Raises:
            CheckpointWriteError: The transfer was stopped.
        """
        root, key = self.root / check_uuid(uuid), self._key(uuid, self.node, node)
        sizes = {name: (root / name).stat().st_size for name in names}
        began_s = time.thread_time()
        for number, chunk in enumerate(_chunks(root, sizes)):
            if number >= _WINDOW:
                oldest = f"{key}/{number - _WINDOW}"
                self._wait(uuid, partial(self._is_taken, oldest))
            self._distributed.put(f"{key}/{number}", chunk)
        self._sent_s = time.thread_time() - began_s

    def receive(self, node: int, uuid: str) -> None:
        """Receive the files that another node sends.

        Raises:
            CheckpointWriteError: The transfer was stopped.
            OSError: They cannot be written.
        """
        key, number = self._key(uuid, node, self.node), 0
        sizes: dict[str, int] = json.loads(self.taken(uuid, f"{key}/0"))
        root = self.root / check_uuid(uuid)
        for name in _checkpoint_files.check_file_names([*sizes]):
            path, left = root / name, sizes[name]
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("xb") as file:
                while left:
                    number += 1
                    data = self.taken(uuid, f"{key}/{number}")
                    file.write(data)
                    left -= len(data)
            faults.reach("storage.between_files")

    def exchange(self, uuid: str, names: Sequence[str]) -> float:
        """Send this node's files to the next node, and receive those of the node before.

        Returns:
            The processor time that it took, in seconds.

        Raises:
            CheckpointWriteError: The transfer was stopped.
            OSError: They cannot be written.
        """
        here, number, began_s = self.node, self._distributed.cross_size, time.thread_time()
        with ThreadPoolExecutor(1, "paceline-copy") as pool:
            sending = pool.submit(self.send, (here + 1) % number, uuid, names)
            try:
                self.receive((here - 1) % number, uuid)
                sending.result()
            except BaseException:
                self.give_up(uuid)
                raise
        return time.thread_time() - began_s + self._sent_s

    def taken(self, uuid: str, key: str) -> bytes:
        """Wait for a value that another node leaves, and return it.

        Raises:
            CheckpointWriteError: The transfer was stopped, or takes too long.
        """
        found: list[bytes] = []

        def is_there() -> bool:
            data = self._distributed.take(key)
            found.extend(() if data is None else (data,))
            return data is not None

        self._wait(uuid, is_there)
        return found[0]

    def _is_taken(self, key: str) -> bool:
        return not self._distributed.is_kept(key)

    def _wait(self, uuid: str, is_over: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        look_s = began_s + _LOOK_S
        while not is_over():
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + _LOOK_S
                if self._distributed.is_kept(f"{uuid}/given-up"):
                    self.stop()
            if self._is_stopped.is_set() or now_s > began_s + self._distributed.timeout_s:
                raise CheckpointWriteError("a transfer to or from another node has ended")
            time.sleep(_PAUSE_S)

    @staticmethod
    def _key(uuid: str, source: int, target: int) -> str:
        return f"{uuid}/{source}-{target}"


def _chunks(root: Path, sizes: Mapping[str, int]) -> Iterator[bytes]:
    """Yield the list of files, then their content; no chunk holds pieces of two files."""
    yield json.dumps(sizes).encode()
    for name, size in sizes.items():
        with (root / name).open("rb") as file:
            for begin in range(0, size, _CHUNK_BYTES):
                data = file.read(min(_CHUNK_BYTES, size - begin))
                if not data:
                    raise OSError(f"{name} has become shorter")
                yield data


class NodeParts(CheckpointParts):
    """Store for the parts of states in memory on several nodes; the first rank of each commits.

    A state is whole when each node has the files of its own ranks and copies of those of the node
    before it. Then the chief writes the manifest, and the other nodes take it from there. So no
    node gives up the state before while another could lose the new one.

    Args:
        memory: Where this node's states are.
        distributed: Where the ranks meet.
        nodes: The node of each rank.
        commit: Called on the chief to write the manifest and delete earlier states.
        failures: What decides whether training continues.
    """

    def __init__(
        self,
        memory: NodeMemory,
        distributed: DistributedContext,
        nodes: Sequence[int],
        commit: Callable[[str, dict[str, Any]], None],
        failures: StoreFailures,
    ) -> None:
        is_first = distributed.local_rank == 0
        own = [rank for rank, node in enumerate(nodes) if node == distributed.cross_rank]
        super().__init__(
            None,
            memory,
            rank=distributed.rank,
            world_size=distributed.size,
            commit=self._commit_on_nodes,
            failures=failures,
            commits_for=() if not is_first else None if distributed.rank == 0 else own,
        )
        self._memory, self._distributed = memory, distributed
        self._commit_here, self._own = commit, own
        memory.begin()

    def close(self) -> None:
        """Stop waiting for missing parts, and end transfers."""
        self._memory.stop()
        super().close()

    def _commit_on_nodes(self, uuid: str, metadata: dict[str, Any]) -> None:
        memory, distributed = self._memory, self._distributed
        try:
            own = {name for rank in self._own for name in memory.files_of(uuid, rank)}
            self.copy_s = memory.exchange(uuid, sorted(own))
            if memory.node:
                distributed.put(f"{uuid}/copied-{memory.node}", b"")
                memory.adopt(memory.taken(uuid, f"{uuid}/manifest-{memory.node}"), uuid)
                delete_others(memory, uuid)
                return
            others = range(1, distributed.cross_size)
            for node in others:
                memory.taken(uuid, f"{uuid}/copied-{node}")
            self._commit_here(uuid, metadata)
            data = (memory.root / uuid / _checkpoint_files.MANIFEST_NAME).read_bytes()
            for node in others:
                distributed.put(f"{uuid}/manifest-{node}", data)
        except (CheckpointError, DistributedError, OSError) as error:
            memory.give_up(uuid)
            raise CheckpointWriteError(f"A state was not copied to all nodes: {error}.") from error


def run_memory_storage(run_id: str, distributed: DistributedContext) -> DirectoryStorage | None:
    """Return the storage of a run's states in memory; None if no parent owns such memory."""
    storage = memory_storage(run_id)
    if storage is None or distributed.cross_size == 1:
        return storage
    return NodeMemory(storage.root.with_name(f"{storage.root.name}.nodes"), distributed)


@dataclass(frozen=True)
class _NodeStates:
    """States on a node: the manifests there and the sizes of files, by UUID."""

    node: int
    manifests: Mapping[str, bytes]
    files: Mapping[str, Mapping[str, int]]

    def has(self, manifest: _checkpoint_files.Manifest, name: str) -> bool:
        """Return whether a file of a state is here, as far as its size shows."""
        return self.files.get(manifest.uuid, {}).get(name) == manifest.files[name].size


def resumed_from_nodes(opened: OpenedRun, distributed: DistributedContext) -> OpenedRun:
    """Return the opened run with the newest whole state in the memory of all nodes, if newer.

    All ranks call this together. Nodes that lack files of the state get them from others, so that
    each can be read like a checkpoint; all other states are removed.

    Args:
        opened: The run as the chief has opened it.
        distributed: Where the ranks meet.
    """
    if distributed.cross_size == 1 or opened.attempt == opened.generation == 0:
        return opened
    found = run_memory_storage(opened.info.run_id, distributed)
    memory = found if isinstance(found, NodeMemory) and distributed.local_rank == 0 else None
    own = None if memory is None else _states_on(memory)
    by_node = [states for states in distributed.allgather(own) if states is not None]
    manifest = _newest(by_node, opened)
    problem = None
    if manifest is not None and len(by_node) < distributed.cross_size:
        problem = "a node has no memory for states"
    elif manifest is not None and memory is not None:
        problem = _assemble(memory, manifest, by_node)
    problems = [text for text in distributed.allgather(problem) if text is not None]
    if problems and distributed.rank == 0:
        logger.warning("A state in memory is not used: %s.", problems[0])
    uuid = None if manifest is None or problems else manifest.uuid
    if memory is not None and memory.root.is_dir():
        for path in memory.root.iterdir():
            if path.name != uuid:
                shutil.rmtree(path, ignore_errors=True)
    if manifest is None or uuid is None:
        return opened
    steps = manifest.metadata["steps_completed"]
    is_chief = distributed.rank == 0
    history = read_history(RunDirectory(opened.path)) if is_chief else None
    last_steps = distributed.broadcast(None if history is None else steps_up_to(history, steps))
    assert last_steps is not None
    return replace(opened, memory_state=uuid, steps_completed=steps, last_steps=last_steps)


def _states_on(memory: NodeMemory) -> _NodeStates:
    paths = [*memory.root.iterdir()] if memory.root.is_dir() else []
    uuids = [path.name for path in paths if path.is_dir() and not path.name.startswith(".")]
    manifests = {
        uuid: (memory.root / uuid / _checkpoint_files.MANIFEST_NAME).read_bytes()
        for uuid in memory.list()
    }
    return _NodeStates(memory.node, manifests, {uuid: memory.held(uuid) for uuid in uuids})


def _newest(by_node: Sequence[_NodeStates], opened: OpenedRun) -> _checkpoint_files.Manifest | None:
    """Return the manifest of the newest state whose files are all on some node; None if none."""
    newest, steps_completed = None, opened.steps_completed
    for uuid in sorted({uuid for states in by_node for uuid in states.manifests}):
        data = next(s.manifests[uuid] for s in by_node if uuid in s.manifests)
        try:
            manifest = _checkpoint_files.decode_manifest(data, uuid)
            found = int(manifest.metadata["steps_completed"])
            has_reports = _has_reports(manifest, opened)
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            logger.warning("Passing over a state in memory: %s", error)
            continue
        is_whole = all(any(s.has(manifest, name) for s in by_node) for name in manifest.files)
        if is_whole and found > steps_completed:
            if has_reports:
                newest, steps_completed = manifest, found
            else:
                logger.warning(
                    "Passing over a state in memory at step %d: reports are lost.", found
                )
    return newest


def _has_reports(manifest: _checkpoint_files.Manifest, opened: OpenedRun) -> bool:
    """Return whether no report before a state can be lost; those of this attempt cannot."""
    if (newest := opened.info.newest_report) is None:
        return True
    journal, number = manifest.metadata[NEWEST_REPORT]
    if str(journal).startswith(f"a{opened.attempt}."):
        return True
    return bool(journal == newest[0] and number <= newest[1])


def _assemble(
    memory: NodeMemory, manifest: _checkpoint_files.Manifest, by_node: Sequence[_NodeStates]
) -> str | None:
    """Get all files of a state to this node, and check them; return a problem or None."""
    uuid, here = manifest.uuid, memory.node
    streams: dict[tuple[int, int], list[str]] = {}
    for target in by_node:
        for name in manifest.files:
            if not target.has(manifest, name):
                source = next(s.node for s in by_node if s.has(manifest, name))
                streams.setdefault((source, target.node), []).append(name)
    try:
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(max(1, len(streams)), "paceline-copy"))
            sending = [
                pool.submit(memory.send, node, uuid, names)
                for (source, node), names in streams.items()
                if source == here
            ]
            try:
                for (source, node), names in streams.items():
                    if node == here:
                        # A file of another size was being written when its rank was lost.
                        for name in names:
                            (memory.root / uuid / name).unlink(missing_ok=True)
                        memory.receive(source, uuid)
                for each in sending:
                    each.result()
            except BaseException:
                memory.give_up(uuid)
                raise
        states = next(s for s in by_node if s.node == here)
        if uuid not in states.manifests:
            memory.adopt(next(s.manifests[uuid] for s in by_node if uuid in s.manifests), uuid)
        memory.verify(uuid)
    except (CheckpointError, DistributedError, OSError) as error:
        return str(error)
    return None
