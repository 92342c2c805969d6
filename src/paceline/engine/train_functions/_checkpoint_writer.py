"""Saving checkpoints in a worker.

Files: ``state`` (what the user saves, the chief's alone), ``rank_<r>`` (what a rank alone knows:
generators, place in the data, gradients within an accumulated step, buffers) and ``shard_<r>`` (a
rank's pieces of sharded tensors), each ``.json`` with ``.safetensors`` beside it if there are
tensors, and ``files/`` with what the user adds.
"""

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from paceline import faults
from paceline.engine.formats._values_without_pickle import packed_without_pickle
from paceline.engine.state._sharded_tensor_pieces import StateInPieces
from paceline.engine.train_functions._rank_checkpoints import RankCheckpoints
from paceline.engine.train_functions._rank_reporter import RankReporter
from paceline.journal import decode_value
from paceline.workers.runs import (
    FILES_FOLDER,
    STATE_VERSION,
    UNSHARDED_VERSION,
    RunSpec,
    checkpoint_uuid,
)

faults.register("train.save")

Files: TypeAlias = bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


class TrainCheckpointWriter:
    """Save what a train function asks for, and this rank's own state beside it.

    Args:
        spec: The run.
        rank: The rank.
        world_size: The number of ranks.
        reporter: The rank's reports.
        checkpoints: Where it goes.
        own_state: Returns what this rank alone knows.
    """

    def __init__(
        self,
        spec: RunSpec,
        rank: int,
        world_size: int,
        reporter: RankReporter,
        checkpoints: RankCheckpoints,
        own_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._own_state = own_state

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
        spec, number = self._spec, self._checkpoints.begin()
        is_chief = self._rank == 0
        parts: dict[str, Any] = {}
        if is_chief or is_sharded:
            _check_given(state, self._rank)
            given = packed_without_pickle(state, allow_pickle=allow_pickle)
            parts["state"] = StateInPieces(given, "state", is_whole=is_chief)
        parts[f"rank_{self._rank}"] = StateInPieces(self._own_state(), "own")
        metadata = {
            "version": STATE_VERSION if is_sharded else UNSHARDED_VERSION,
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
        num_parts = self._world_size if is_sharded else min(self._world_size, spec.num_shards)
        self._checkpoints.save(
            parts, metadata, lambda path: _copy_files(sources, path), num_parts=num_parts
        )
        if sources:
            # The user may change them as soon as this returns.
            self._checkpoints.settle()

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
