"""Memory of trials for their states: it outlives attempts, for the next attempt on this node.

The master loads this module, so it must not load the workers.
"""

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline._base.files import (
    is_locked_directory_of,
    make_locked_directory,
    read_regular,
    remove_tree,
    write_atomically,
)
from paceline._base.journal_records import check_seal, seal
from paceline._base.run_memory import CLAIM_NAME, memory_root, open_private_directory
from paceline._cluster.messages.runner_messages import AttemptEnd, AttemptSpec
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import AttemptDirectory

logger = logging.getLogger(__name__)

# How long states wait for the next attempt: it starts at once, unless another trial is before it.
# On several nodes, it starts once the master has waited for a node that is lost.
_KEEP_S = 60.0
# The note may be a job's.
_MOST_KEEP_S = 3600.0
_PREFIX = "memory-"
# Ends after which the trial may go on from a state that is newer than its checkpoint.
_LOSSES = (ExitReason.EXITED, ExitReason.RUNNER_LOST, ExitReason.PREEMPTION_TIMEOUT)


class _Note(msgspec.Struct, kw_only=True):
    """Memory of a trial: the attempt that uses it, or `key` of the end that left states there."""

    path: str
    attempt_id: int
    key: str = ""
    kept_at: float = 0.0
    keep_s: float = _KEEP_S


def _read(root: Path, trial_id: int) -> _Note | None:
    try:
        data = check_seal(read_regular(root / f"{_PREFIX}{trial_id}"))
        note = msgspec.json.decode(data, type=_Note)
    except (OSError, ValueError):
        return None
    # A job may have written it: nothing but memory is ever removed.
    return note if is_locked_directory_of(Path(note.path), memory_root()) else None


def _write(root: Path, trial_id: int, note: _Note) -> None:
    write_atomically(root / f"{_PREFIX}{trial_id}", seal(msgspec.json.encode(note)))


def _lock(path: str) -> int:
    directory = open_private_directory(path)
    # Shared by all who need the directory: a leftover is one that nobody has locked.
    with suppress(OSError):
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return directory


def hold_memory(directory: AttemptDirectory, spec: AttemptSpec) -> str | None:
    """Return the memory of an attempt's trial, locked until this process ends; None without one."""
    note = _read(directory.path.parent, spec.trial_id)
    if note is None or note.attempt_id != spec.attempt_id:
        return None
    try:
        _lock(note.path)  # never closed
    except OSError:
        return None
    return note.path


def keep_memory(directory: AttemptDirectory, end: AttemptEnd) -> AttemptEnd:
    """Return the end of an attempt with the key of the states in memory that it leaves, if any.

    They are for the attempt that gets this key back. So the master has taken this very end, after
    all reports up to the states, and no other attempt has come between.
    """
    try:
        spec, root = directory.read_spec(), directory.path.parent
        note = _read(root, spec.trial_id)
        if end.code == 0 or not _may_go_on(directory, spec, end.reason):
            return end
        if note is None or note.attempt_id != spec.attempt_id:
            return end
        note.key, note.kept_at = secrets.token_hex(8), time.time()
        if spec.num_members > 1:
            note.keep_s = _KEEP_S + spec.lease_s
        _write(root, spec.trial_id, note)
    except (OSError, ValueError) as error:
        logger.warning("The states in memory are not kept: %s", error)
        return end
    return msgspec.structs.replace(end, memory=note.key)


def _may_go_on(directory: AttemptDirectory, spec: AttemptSpec, reason: ExitReason) -> bool:
    """Return whether an attempt after this one may begin with what this node has in memory."""
    if reason not in _LOSSES and not (spec.num_members > 1 and reason is ExitReason.KILLED):
        # The loss of one node kills the others.
        return False
    # Without a report of the start, the master may have hidden the reports beyond the checkpoint.
    # With several nodes, what the first one has decides for all.
    if spec.member > 0:
        return True
    run = directory.run
    return any(key.rank == 0 and [*run.reader(key).read(1)] for key in run.journal_keys())


class TrialMemories:
    """Memory of the trials of a node, for a single thread; the next process finds it again.

    Args:
        root: The directory of the attempts' directories, for the notes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # The descriptor that holds the lock on each trial's directory.
        self._locks: dict[int, int | None] = {}
        for path in root.glob(f"{_PREFIX}*"):
            if (text := path.name.removeprefix(_PREFIX)).isdecimal():
                note = _read(root, int(text))
                self._locks[int(text)] = None
                with suppress(OSError):
                    self._locks[int(text)] = None if note is None else _lock(note.path)

    def give(self, spec: AttemptSpec) -> None:
        """Have an attempt use the memory of its trial; states there must be those it may take."""
        if spec.has_prefix or spec.interactive:
            return
        trial_id, note = spec.trial_id, _read(self._root, spec.trial_id)
        if note is not None and note.attempt_id == spec.attempt_id:
            return
        try:
            if note is None or not spec.memory or note.key != spec.memory:
                self._remove(trial_id)
                path, self._locks[trial_id] = make_locked_directory(memory_root())
            else:
                path = Path(note.path)
                self._renew(path)
            _write(self._root, trial_id, _Note(path=str(path), attempt_id=spec.attempt_id))
        except OSError as error:
            logger.info("Trial %d has no memory that outlives an attempt: %s", trial_id, error)
            self._remove(trial_id)

    @staticmethod
    def _renew(path: Path) -> None:
        directory = open_private_directory(str(path))
        try:
            with suppress(FileNotFoundError):
                os.unlink(CLAIM_NAME, dir_fd=directory)
        finally:
            os.close(directory)

    def sweep(self, is_used: Callable[[int], bool]) -> None:
        """Remove the memory of attempts that have ended, unless the next one may come for it."""
        for trial_id in [*self._locks]:
            note = _read(self._root, trial_id)
            if note is not None and is_used(note.attempt_id):
                continue
            keep_s = 0.0 if note is None or not note.key else min(note.keep_s, _MOST_KEEP_S)
            if note is None or not 0 <= time.time() - note.kept_at < keep_s:
                self._remove(trial_id)

    def close(self, is_used: Callable[[int], bool]) -> None:
        """Remove all memory but that of attempts that continue."""
        for trial_id in [*self._locks]:
            note = _read(self._root, trial_id)
            if note is None or not is_used(note.attempt_id):
                self._remove(trial_id)

    def _remove(self, trial_id: int) -> None:
        note, lock = _read(self._root, trial_id), self._locks.pop(trial_id, None)
        if note is not None:
            remove_tree(note.path)
        if lock is not None:
            os.close(lock)
        with suppress(OSError):
            (self._root / f"{_PREFIX}{trial_id}").unlink()
