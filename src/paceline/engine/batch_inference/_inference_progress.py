"""How far a batch inference has come, in checkpoints, and the results that belong to it."""

import logging
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from paceline import core
from paceline._atomic_files import replacing_atomically
from paceline.engine.formats._json_and_safetensors import (
    StateFormatError,
    load_state,
    save_state,
)
from paceline.engine.metrics._metric_reducers import ReducerSet

logger = logging.getLogger(__name__)

_MARKER = ".paceline-inference"
_COLLECTED = "collected"
_OTHER_RUN, _SOMETHING = "the results of another run", "something else"
_HINTS = {
    _OTHER_RUN: "name another directory. To go on with that run, give its run directory as"
    " `resume=`, such as 'paceline_runs/20260101-120000-name'.",
    _SOMETHING: "name another directory, or delete this one if nobody needs it.",
}
_BATCHES = re.compile(r"batches-(\d{10,})")


class InferenceProgress:
    """Number of finished batches, and what reducers have collected of them.

    Every rank makes it and calls each of its methods.

    Args:
        context: The core context.
        reducers: The reducers.
        facts: What must be the same in all attempts.
        output_dir: The directory for results, if there is one.

    Attributes:
        num_done: The number of batches that are finished, from the first one on.

    Raises:
        ValueError: Facts differ from those of an earlier attempt, or the directory has results of
            another run, or lacks those of an earlier attempt.
    """

    def __init__(
        self,
        context: core.Context,
        reducers: ReducerSet,
        facts: dict[str, Any],
        output_dir: Path | None,
    ) -> None:
        self.num_done = 0
        self._context = context
        self._reducers = reducers
        self._facts = facts
        self._output_dir = output_dir
        self._earlier: list[list[Any]] = []
        self._stored: str | None = None
        # The machines whose directories have results; None if an earlier version began the run.
        self._machines: list[str] | None = []
        latest = context.distributed.broadcast(context.latest_checkpoint)
        if latest is None:
            self._output_id = context.distributed.broadcast(str(uuid4()))
            self._check_output()
            # So that results of this attempt are told from those of another run.
            self.store()
        else:
            self._resume(latest)
            self._check_output()
        self._clean_output()

    @property
    def output_path(self) -> Path | None:
        """The directory for what this rank makes of the next batches."""
        if self._output_dir is None:
            return None
        name = f"batches-{self.num_done:010}"
        return self._output_dir / name / f"rank-{self._context.distributed.rank}"

    def store(self) -> None:
        """Store a checkpoint, and delete the one that this attempt has stored before."""
        metadata = {
            "steps_completed": self.num_done,
            "output_id": self._output_id,
            "output_machines": self._machines,
            "inference": self._facts,
        }
        rank = self._context.distributed.rank
        earlier = self._earlier if rank == 0 else []
        collected = [*earlier, self._reducers.shares(for_training=False)]
        with self._context.checkpoint.store_path(metadata, shard=True) as (path, uuid):
            try:
                save_state(collected, path, f"{_COLLECTED}_{rank}")
            except StateFormatError as error:
                problem = str(error).partition(" Hint:")[0]
                raise StateFormatError(
                    "What reducers collect in a batch inference must be plain values or tensors, as"
                    f" checkpoints hold it. {problem} Hint: give such values to `update`, or return"
                    " them from `per_slot_reduce`."
                ) from None
        # One of an earlier attempt stays, as it may be of another run.
        if rank == 0 and self._stored is not None:
            self._context.checkpoint.delete(self._stored)
        self._stored = uuid

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of all reducers over all finished batches."""
        own = self._reducers.shares(for_training=False)
        shares = [*self._earlier, *self._context.distributed.allgather(own)]
        return self._reducers.combined(shares, for_training=False)

    def _resume(self, uuid: str) -> None:
        metadata = self._context.checkpoint.get_metadata(uuid)
        if "inference" not in metadata:
            raise ValueError(
                f"The run must go on from a checkpoint of a batch inference, but {uuid} is another"
                " one. Hint: start it as a run of its own."
            )
        differing = [
            f"{name} was {value} and is {self._facts[name]}"
            for name, value in metadata["inference"].items()
            if self._facts.get(name) != value
        ]
        if differing:
            raise ValueError(
                "A batch inference must go on with what it was begun with, but"
                f" {', '.join(differing)}. Hint: start another run by `resume=None`."
            )
        self.num_done = metadata["steps_completed"]
        self._output_id = metadata["output_id"]
        self._machines = metadata.get("output_machines")
        with self._context.checkpoint.restore_path(uuid) as path:
            names = sorted(path.glob(f"{_COLLECTED}_*.json"))
            self._earlier = [share for name in names for share in load_state(path, name.stem)]
        if self._context.distributed.rank == 0:
            logger.info("Going on after %d finished batches.", self.num_done)

    def _check_output(self) -> None:
        directory, gather = self._output_dir, self._context.distributed.allgather
        held, machine = None, None
        has_results = False
        if directory is not None:
            marker = directory / _MARKER
            # It is empty if an earlier version was killed while it wrote it.
            known = (marker.read_text() if marker.exists() else "") or None
            machine, has_results = socket.gethostname(), known == self._output_id
            if known is not None and not has_results:
                held = _OTHER_RUN
            elif known is None and directory.exists() and _has_others(directory):
                held = _SOMETHING
        # Ranks of one machine see the directory at different times.
        found = gather((held, machine, has_results))
        for one, _, _ in found:
            if one is not None:
                raise ValueError(
                    "`output_dir` must be an empty or new directory, or that of the run that is"
                    f" resumed, but {str(directory)!r} holds {one}. Hint: {_HINTS[one]}"
                )
        if self._machines is None:
            return
        here = {name: has_results for _, name, has_results in found if name is not None}
        if self.num_done:
            self._check_earlier_results(here, self._machines)
        self._machines = sorted({*self._machines, *here})

    def _check_earlier_results(self, here: Mapping[str, bool], earlier: Sequence[str]) -> None:
        """Check that what earlier attempts made is where this one adds to it.

        Args:
            here: The machines of this attempt, with whether their directories have results.
            earlier: The machines of earlier attempts; none if they had no directory.
        """
        directory = str(self._output_dir)
        lacking = [name for name in earlier if not here.get(name, True)]
        if not here and earlier:
            problem = "none is given"
        elif here and not earlier:
            problem = f"they were made without one, and {directory!r} is given"
        elif lacking:
            where = f" on {', '.join(lacking)}" if len(here) > 1 else ""
            problem = f"{directory!r}{where} holds none"
        else:
            problem = None
        if problem is not None:
            raise ValueError(
                f"`output_dir` must hold the results of the {self.num_done} batches that are"
                f" finished, but {problem}. Hint: give what was given before; if the results are"
                " gone, `resume=None` processes all batches again."
            )
        elsewhere = [name for name in earlier if name not in here]
        if elsewhere and not all(here.values()) and self._context.distributed.rank == 0:
            logger.warning(
                "Results of earlier batches are in %r on %s.", directory, ", ".join(elsewhere)
            )

    def _clean_output(self) -> None:
        """Remove what was made of batches that are not finished."""
        distributed, directory = self._context.distributed, self._output_dir
        if directory is not None and distributed.local_rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with replacing_atomically(directory / _MARKER) as part:
                part.write_text(self._output_id)
            for path in directory.iterdir():
                batches = _BATCHES.fullmatch(path.name)
                if batches is not None and int(batches[1]) >= self.num_done:
                    shutil.rmtree(path)
        distributed.allgather(None)


def _has_others(directory: Path) -> bool:
    """Tell whether a directory has more than a marker, or a part of one that a kill has left."""
    return any(_MARKER not in path.name for path in directory.iterdir())
