"""Saving checkpoints in a worker.

Files: ``state`` (what the user saves, the chief's alone), ``rank_<r>`` (what a rank alone knows:
generators, place in the data, gradients within an accumulated step, buffers) and ``shard_<r>`` (a
rank's pieces of sharded tensors), each ``.json`` with ``.safetensors`` beside it if there are
tensors, and ``files/`` with what the user adds.
"""

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from paceline import core, faults
from paceline.engine import CheckpointSaver, Divided, KeptCheckpoints, RankReporter, packed
from paceline.journal import RunDirectory, decode_value
from paceline.storage import CheckpointStorage, Kept, RetentionRules
from paceline.train._spec import (
    FILES_FOLDER,
    STATE_VERSION,
    UNSHARDED_VERSION,
    RankInfo,
    RunSpec,
    checkpoint_uuid,
)

logger = logging.getLogger(__name__)

faults.register("train.save")

Files: TypeAlias = bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None

_FINISH_S = 1.0


class CheckpointWriter:
    """Save a rank's part of each checkpoint.

    Args:
        spec: The run.
        rank_info: The rank.
        run: Where checkpoints are noted that are being written.
        storage: Where checkpoints go.
        reporter: The rank's journal.
        own_state: Returns what this rank alone knows.
    """

    def __init__(
        self,
        spec: RunSpec,
        rank_info: RankInfo,
        run: RunDirectory,
        storage: CheckpointStorage,
        reporter: RankReporter,
        own_state: Callable[[], dict[str, Any]],
    ) -> None:
        self.num_saves = 0
        self._spec = spec
        self._rank_info = rank_info
        self._run = run
        self._storage = storage
        self._reporter = reporter
        self._own_state = own_state
        self._parts = core.CheckpointParts(
            run,
            storage,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            commit=self._commit,
        )
        self._saver = CheckpointSaver(rank_info.rank)
        is_scored = spec.score_attribute is not None
        self._kept = KeptCheckpoints(
            map(self._by_quality, spec.kept),
            rules=RetentionRules(
                latest=1 if is_scored and spec.num_to_keep else spec.num_to_keep,
                best=spec.num_to_keep if is_scored else None,
            ),
            delete=self._delete,
        )

    @property
    def num_pending(self) -> int:
        """How many of this rank's checkpoints wait for parts of others."""
        return self._parts.num_pending

    def save(
        self, state: Any, *, files: Files, allow_pickle: bool, is_sharded: bool = False
    ) -> None:
        """Save a checkpoint; see `train.save_checkpoint`.

        Args:
            state: What the user saves.
            files: Paths to store a copy of.
            allow_pickle: Whether to pickle what the safe format does not know.
            is_sharded: Whether models are divided among the ranks.
        """
        self._saver.settle()
        self._parts.check()
        self._reporter.begin()
        number = self.num_saves + 1
        rank, is_chief = self._rank_info.rank, self._rank_info.rank == 0
        parts: dict[str, Any] = {}
        if is_chief or is_sharded:
            _check_given(state, rank)
            given = packed(state, allow_pickle=allow_pickle)
            parts["state"] = Divided(given, "state", is_whole=is_chief)
        parts[f"rank_{rank}"] = Divided(self._own_state(), "own")
        metadata = self._metadata(number, is_sharded=is_sharded)
        sources: list[Path] = []
        if is_chief:
            metadata["score"] = self._score(state)
            sources = _sources(files)
        self.num_saves = number
        if faults.is_active():
            faults.reach("train.save")
        destination = self._parts.store(metadata["uuid"], metadata)
        self._saver.save(parts, destination, lambda path: _copy_files(sources, path))
        if sources:
            # The user may change them as soon as this returns.
            self._saver.settle()

    def finish(self, error: BaseException | None) -> None:
        """Wait until this rank's parts are stored; after an error a moment for those of others.

        Raises:
            CheckpointWriteError: A part could not be stored.
        """
        try:
            self._saver.finish()
            if error is not None:
                self._parts.finish(0, _FINISH_S)
        except Exception:
            if error is None:
                raise
            # The error of the user's function is the one to raise.
            logger.exception("A checkpoint could not be stored.")

    def await_commits(self, timeout_s: float) -> None:
        """Wait until the checkpoints saved so far exist, but not for longer."""
        self._saver.settle()
        self._parts.finish(0, timeout_s)

    def settle(self, num_expected: int, timeout_s: float) -> None:
        """Wait until the checkpoints are committed of which all ranks have stored their part."""
        self._parts.finish(self.num_saves - num_expected, timeout_s)

    def close(self) -> None:
        """Give up what waits for parts of other ranks."""
        self._parts.close()

    def _commit(self, uuid: str, metadata: dict[str, Any]) -> None:
        num_shards = self._rank_info.world_size
        journal = self._reporter.journal
        core.commit_checkpoint(self._storage, journal, uuid, metadata, num_shards=num_shards)
        kept = Kept(uuid, metadata["steps_completed"], metadata["score"])
        self._kept.add(self._by_quality(kept))

    def _by_quality(self, kept: Kept) -> Kept:
        """Return a checkpoint with a larger score the better it is."""
        if kept.score is None or not self._spec.is_score_minimized:
            return kept
        return kept._replace(score=-kept.score)

    def _delete(self, kept: Kept) -> None:
        core.delete_checkpoint(self._run, self._storage, self._reporter.journal, kept.uuid)

    def _metadata(self, number: int, *, is_sharded: bool) -> dict[str, Any]:
        spec = self._spec
        return {
            "version": STATE_VERSION if is_sharded else UNSHARDED_VERSION,
            "uuid": checkpoint_uuid(spec.run_id, spec.attempt, spec.generation, number),
            "number": number,
            "steps_completed": self._reporter.num_reports,
            "world_size": self._rank_info.world_size,
            "num_shards": spec.num_shards,
            "seed": spec.seed,
            "metrics": self._reporter.last_metrics,
        }

    def _score(self, state: Any) -> float | None:
        """Return the value by which the best checkpoints are chosen; None for NaN."""
        name = self._spec.score_attribute
        if name is None:
            return None
        metrics = self._reporter.last_metrics
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


def _sources(files: Files) -> list[Path]:
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
