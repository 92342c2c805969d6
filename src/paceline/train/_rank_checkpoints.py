"""Checkpoints saved by a rank on request of its own loop."""

import io
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline import faults
from paceline._base.journal_records import decode_value
from paceline._base.run_directory import RunDirectory
from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver, KeptCheckpoints
from paceline._training.engine.checkpoints.state_format import (
    MAX_DEPTH,
    MAX_DIGITS,
    StateInPieces,
    is_storable,
    is_too_large,
    kind_of,
    read_versioned_files,
)
from paceline._training.engine.checkpoints.tensor_reader import (
    lazy_stored_tensors,
    whole,
    with_items,
)
from paceline._training.engine.gradient_reduction import plain_model
from paceline.core._background_checkpoints import (
    CheckpointParts,
    commit_checkpoint,
    delete_checkpoint,
)
from paceline.storage._checkpoint_errors import STATE_VERSION
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._retention_rules import Kept, RetentionRules
from paceline.train._rank_comparison import RankComparison
from paceline.train._rank_reports_and_state import RankReporter
from paceline.train._run_access import storage_holding
from paceline.train._run_protocol import (
    FILES_FOLDER,
    RunSpec,
    StoredAt,
    checked_metadata,
    checkpoint_uuid,
)

logger = logging.getLogger(__name__)

# How long parts of other ranks are waited for after an error, in seconds.
_FINISH_S = 1.0


class RankCheckpoints:
    """A rank's part of each checkpoint, stored in the background; the chief commits whole ones.

    Checkpoints are numbered from 1. All ranks that store parts are expected to save equally many.

    Args:
        run: Where checkpoints are noted that are being written.
        storage: Where they go.
        reporter: The rank's journal.
        rank: The rank.
        world_size: The number of ranks.
        local_size: The ranks of this machine.
        existing: The checkpoints that are there, from before.
        rules: Which ones the chief keeps.
        is_score_minimized: Whether a smaller score is better.
        comparison: The comparison of the ranks before a checkpoint exists.

    Attributes:
        num_saves: How many this rank has saved.
    """

    def __init__(
        self,
        run: RunDirectory,
        storage: CheckpointStorage,
        reporter: RankReporter,
        *,
        rank: int,
        world_size: int,
        local_size: int,
        existing: Iterable[Kept],
        rules: RetentionRules,
        is_score_minimized: bool,
        comparison: RankComparison,
    ) -> None:
        self.num_saves = 0
        self._run = run
        self._storage = storage
        self._reporter = reporter
        self._rank = rank
        self._is_score_minimized = is_score_minimized
        self._comparison = comparison
        storage.watch(partial(reporter.record_store_state, storage.url))
        self._saver = CheckpointSaver(rank, local_size)
        self._parts = CheckpointParts(
            run, storage, rank=rank, world_size=world_size, commit=self._commit
        )
        existing = map(self._by_quality, existing)
        self._kept = KeptCheckpoints(existing, rules=rules, delete=self._delete)

    @property
    def num_pending(self) -> int:
        """How many of this rank's checkpoints wait for parts of others."""
        return self._parts.num_pending

    def begin(self) -> int:
        """Wait for the part being stored, check for errors, and return the next number.

        Raises:
            CheckpointWriteError: Training must not continue without the state that could not be
                stored.
            RanksDifferError: Ranks differ where they must agree.
        """
        self.settle()
        self._parts.check()
        self._comparison.compare_start()
        self._reporter.begin()
        return self.num_saves + 1

    def save(
        self,
        parts: dict[str, Any],
        metadata: Mapping[str, Any],
        write_more: Callable[[Path], None],
        num_parts: int,
    ) -> None:
        """Copy this rank's part of the next checkpoint, and store the copy in the background.

        Args:
            parts: Names of files to nested states, some of them `StateInPieces`.
            metadata: The checkpoint's "uuid" and "score", and further facts about it.
            write_more: Called in the thread with the directory before the part is complete.
            num_parts: The first ranks, which store a part; the others do nothing.
        """
        self.num_saves += 1
        if self._rank >= num_parts:
            return
        # Digest before the part: once all parts are stored, the chief compares the digests.
        self._comparison.leave(_digest_name(self.num_saves))
        reporter = self._reporter
        known = {
            "number": self.num_saves,
            "steps_completed": reporter.steps_completed,
            "num_reports": reporter.num_reports,
            "world_size": num_parts,
            "metrics": reporter.last_metrics,
        }
        destination = self._parts.store(
            metadata["uuid"], {**known, **metadata}, num_parts=num_parts
        )
        self._saver.save(parts, destination, write_more, self._storage.file_sender)

    def settle(self) -> None:
        """Wait until this rank's newest part is stored."""
        self._saver.settle()

    def finish(self, error: BaseException | None) -> None:
        """Wait until this rank's parts are stored; after an error a moment for other ranks' parts.

        Raises:
            CheckpointWriteError: A part could not be stored.
            RanksDifferError: They differ where they must agree.
        """
        try:
            self._saver.finish()
            if error is None:
                self._parts.check()
                self._comparison.compare_start()
            if error is not None:
                self._parts.finish(0, _FINISH_S)
        except Exception:
            if error is None:
                raise
            # The error of the user's function is the one to raise.
            logger.exception("A checkpoint could not be stored.")

    def await_commits(self, num_expected: int, timeout_s: float) -> None:
        """Wait until so many checkpoints exist, but not for longer."""
        self._parts.finish(self.num_saves - num_expected, timeout_s)

    def close(self) -> None:
        """Stop waiting for parts of other ranks, and unwatch the storage."""
        self._parts.close()
        self._storage.watch(None)

    def _commit(self, uuid: str, metadata: dict[str, Any]) -> None:
        self._comparison.compare(_digest_name(metadata["number"]), metadata["world_size"])
        journal = self._reporter.journal
        commit_checkpoint(
            self._run, self._storage, journal, uuid, metadata, num_shards=metadata["world_size"]
        )
        kept = Kept(uuid, metadata["steps_completed"], metadata["score"])
        self._kept.add(self._by_quality(kept))

    def _by_quality(self, kept: Kept) -> Kept:
        """Return a checkpoint with its score negated if smaller is better."""
        if kept.score is None or not self._is_score_minimized:
            return kept
        return kept._replace(score=-kept.score)

    def _delete(self, kept: Kept) -> None:
        delete_checkpoint(self._run, self._storage, self._reporter.journal, kept.uuid)


def _digest_name(number: int) -> str:
    return f"checkpoint {number}"


_PICKLED = "paceline:pickled"


def packed_without_pickle(value: Any, *, allow_pickle: bool) -> Any:
    """Return a nested value with each object having a `state_dict()` replaced by its state.

    Args:
        value: The user's value.
        allow_pickle: Whether values that the safe format does not know are pickled.

    Raises:
        TypeError: Something is not known to the safe format; the message names its key.
    """
    return _packed(value, "", allow_pickle, 0)


def unpacked_without_pickle(value: Any) -> Any:
    """Return the value packed by `packed_without_pickle`, with states in place of objects."""
    if isinstance(value, dict) and value.keys() == {_PICKLED}:
        import cloudpickle

        return cloudpickle.loads(value[_PICKLED].numpy().tobytes())
    return with_items(value, unpacked_without_pickle)


def _packed(value: Any, path: str, allow_pickle: bool, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(
            f"`save_checkpoint` stores what is nested {MAX_DEPTH} deep at most, but"
            f" `state{path[:40]}...` is deeper, or holds itself. Hint: save a flat list of its"
            " parts."
        )
    below = depth + 1
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return _packed(_plain(value).state_dict(), path, allow_pickle, below)
    if isinstance(value, Mapping):
        if any(map(is_too_large, value)):
            raise TypeError(
                f"Keys of a state must be strings or integers of {MAX_DIGITS} digits at most, but"
                f" `state{path}` has a longer one. Hint: use a string."
            )
        return {k: _packed(v, f"{path}[{k!r}]", allow_pickle, below) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_packed(v, f"{path}[{i}]", allow_pickle, below) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if is_storable(value):
        # Training continues while the checkpoint is written.
        return value.copy() if hasattr(value, "__array__") else value
    if allow_pickle:
        return {_PICKLED: _pickled(value, path)}
    raise TypeError(
        "`save_checkpoint` stores tensors, numbers, strings, booleans, None, lists, tuples,"
        " dictionaries, and what has a `state_dict()`, but"
        f" `state{path}` is {kind_of(value)}. Hint: save what it is made of, or pass"
        " `allow_pickle=True`."
    )


def _plain(value: Any) -> Any:
    """Return the user's own module, without wrappers and their prefixes of state names."""
    if isinstance(value, DistributedDataParallel):
        return value.module
    return plain_model(value) if isinstance(value, torch.nn.Module) else value


def _pickled(value: Any, path: str) -> torch.Tensor:
    import cloudpickle

    buffer = io.BytesIO()
    try:
        cloudpickle.dump(value, buffer)  # type: ignore[no-untyped-call]
    except Exception as error:
        # Objects raise anything from their own methods of pickling.
        raise TypeError(
            f"`state{path}` cannot be pickled for `save_checkpoint`: {error}"
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


faults.register("train.save")

Files: TypeAlias = bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


@dataclass(eq=False, repr=False)
class TrainCheckpointWriter:
    """Writer of a train function's checkpoints, with this rank's own state beside the user's.

    Args:
        spec: The run.
        rank: The rank.
        world_size: The number of ranks.
        reporter: The rank's reports.
        checkpoints: Where it goes.
        own_state: Returns this rank's own part of the state.
    """

    spec: RunSpec
    rank: int
    world_size: int
    reporter: RankReporter
    checkpoints: RankCheckpoints
    own_state: Callable[[], dict[str, Any]]

    def save(
        self, state: Any, *, files: Files, allow_pickle: bool, is_sharded: bool = False
    ) -> None:
        """Save a checkpoint; see `train.save_checkpoint`.

        Args:
            state: The user's state.
            files: Paths to store a copy of.
            allow_pickle: Whether to pickle values that the safe format does not know.
            is_sharded: Whether models are divided among the ranks.
        """
        spec, number = self.spec, self.checkpoints.begin()
        is_chief = self.rank == 0
        parts: dict[str, Any] = {}
        if is_chief or is_sharded:
            _check_given(state, self.rank)
            given = packed_without_pickle(state, allow_pickle=allow_pickle)
            parts["state"] = StateInPieces(given, "state", is_whole=is_chief)
        parts[f"rank_{self.rank}"] = StateInPieces(self.own_state(), "own")
        metadata = {
            "version": STATE_VERSION,
            "uuid": checkpoint_uuid(spec.run_id, spec.attempt, spec.generation, number),
            "num_shards": spec.num_shards,
            "seed": spec.seed,
        }
        sources: list[Path] = []
        if is_chief:
            metadata["score"] = self._score(state)
            sources = _given_file_sources(files)
        if faults.is_active():
            faults.reach("train.save")
        # Idle ranks may skip the loop that saves; they know nothing that the chief does not know.
        num_parts = self.world_size if is_sharded else min(self.world_size, spec.num_shards)
        self.checkpoints.save(
            parts, metadata, lambda path: _copy_files(sources, path), num_parts=num_parts
        )
        if sources:
            # The user may change them as soon as this returns.
            self.checkpoints.settle()

    def _score(self, state: Any) -> float | None:
        """Return the score for choosing the best checkpoints; None if not finite."""
        name = self.spec.score_attribute
        if name is None:
            return None
        metrics = self.reporter.last_metrics
        saved = state if isinstance(state, Mapping) else {}
        if name not in saved and name not in metrics:
            raise ValueError(
                f"The checkpoint strategy goes by {name!r}, which must be in the state that is"
                f" saved or in the last report, but they have {sorted(map(str, saved))} and"
                f" {sorted(metrics)}."
            )
        value = saved[name] if name in saved else decode_value(metrics[name])
        try:
            score = float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"The checkpoint strategy goes by {name!r}, which must be a number, but got"
                f" {value!r}."
            ) from None
        return score if math.isfinite(score) else None


def _check_given(state: Any, rank: int) -> None:
    if state is None:
        raise TypeError(
            "`save_checkpoint` must be given what to save on every rank, as each stores its pieces"
            f" of the model, but got nothing on rank {rank}. Hint: make the same call on all ranks."
        )


def _given_file_sources(files: Files) -> list[Path]:
    # Every checkpoint consists of files, so that True asks for nothing more.
    if files is None or isinstance(files, bool):
        return []
    given = [files] if isinstance(files, (str, os.PathLike)) else files
    sources = [Path(path) for path in given]
    for path in sources:
        if not path.exists():
            raise FileNotFoundError(f"`files` must name existing paths, but got {str(path)!r}.")
    names = [path.name for path in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"`files` must have different names, but got {sorted(names)}.")
    return sources


def _copy_files(sources: Sequence[Path], directory: Path) -> None:
    for source in sources:
        target = directory / FILES_FOLDER / source.name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)


class UserStateReader:
    """Reader of a checkpoint with verified files; close after use.

    Args:
        stored: Where it is.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointCorruptError: Files are missing or altered.
        ValueError: It is no checkpoint of a train function, or of an unknown version.
    """

    def __init__(self, stored: StoredAt) -> None:
        storage = storage_holding(stored)
        self.uuid = stored.uuid
        self.metadata = checked_metadata(stored.uuid, storage.manifest(stored.uuid).metadata)
        self._stack = ExitStack()
        self._path = Path(self._stack.enter_context(storage.restore_path(stored.uuid)))

    def state(self, *, is_lazy: bool = False) -> Any:
        """Return the state saved by the user, with tensors on the CPU.

        Args:
            is_lazy: Whether sharded tensors are read when they are used.
        """
        state = read_versioned_files(self._path, "state")
        return unpacked_without_pickle(lazy_stored_tensors(state) if is_lazy else whole(state))

    def of_rank(self, rank: int) -> dict[str, Any] | None:
        """Return the state of a single rank, or None for a rank not in the checkpoint.

        Pieces of sharded tensors are read later, see `StoredTensor`.
        """
        if not (self._path / f"rank_{rank}.json").exists():
            return None
        return read_versioned_files(self._path, f"rank_{rank}")

    def copy_files(self, target: Path) -> None:
        """Copy the user's files into a directory."""
        target.mkdir(parents=True, exist_ok=True)
        source = self._path / FILES_FOLDER
        if source.is_dir():
            # A copy is the user's to change, unlike the files of a checkpoint.
            shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)

    def close(self) -> None:
        """Let go of the files."""
        self._stack.close()

    def __enter__(self) -> "UserStateReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
