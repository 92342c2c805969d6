"""Reports of libraries with a loop of their own, in train functions and in plain scripts."""

import atexit
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline import core, train
from paceline.train._run_protocol import current_session

logger = logging.getLogger(__name__)

# Beginnings of the names that libraries give to metrics of an evaluation.
EVALUATED = ("eval", "test", "val")
_POINTER = "path.txt"


def library_report(
    metrics: Mapping[str, Any], evaluated: Mapping[str, Any], *, step: int, evaluates: bool
) -> None:
    """Report metrics of training, metrics of an evaluation, or both.

    A search judges the evaluated metrics. If a library evaluates nothing, it judges all reports.

    Args:
        metrics: The report: metrics of training, and where it stands. If there are none, it is what
            was evaluated.
        evaluated: Metrics of an evaluation since the last report, and where it took place.
        step: The steps of the optimizer that the library has completed.
        evaluates: Whether the library evaluates at all.
    """
    session = current_session()
    if session is None:
        train.report({**evaluated, **metrics})
    else:
        validation = (dict(evaluated) or False) if evaluates or evaluated else True
        session.report(dict(metrics or evaluated), validation, step)


class LibraryRun:
    """Run that a library's hooks report to: the train function's, else a run of `core.init`.

    The first use begins it. It ends with the process, as libraries log after training too: as
    failed if an exception ended the process within training.

    Args:
        context: A context of `core.init` that the user has opened and closes.
        options: Arguments of `core.init` for a run of its own.
        is_chief_alone: Whether only the chief makes calls. Other ranks are not awaited then.

    Attributes:
        is_training: Whether the library trains at present.
    """

    def __init__(
        self,
        context: core.Context | None,
        options: Mapping[str, Any],
        *,
        is_chief_alone: bool = False,
    ) -> None:
        self._given = context
        self._options = dict(options)
        self._is_chief_alone = is_chief_alone
        self._own: core.Context | None = None
        self._has_warned = False
        self._files: Any = None
        self.is_training = False
        self.step = 0

    @property
    def context(self) -> core.Context | None:
        """The context to report to; None in a worker of a trainer."""
        if train.in_worker():
            return None
        if self._given is None and self._own is None:
            alone = core.DistributedContext.single() if self._is_chief_alone else None
            self._own = core.init(distributed=alone, **self._options)
            atexit.register(self._end_with_process)
        return self._given or self._own

    def set_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Set the hyperparameters that a new run records; they have no effect once it has begun."""
        self._options.setdefault("hparams", hparams)

    def begin(self) -> None:
        """Begin the run, unless it has begun, and training."""
        self.is_training = self.context is not None

    def report(
        self,
        metrics: Mapping[str, Any],
        evaluated: Mapping[str, Any],
        *,
        step: int,
        evaluates: bool = True,
    ) -> None:
        """Report metrics; see `library_report`. In a plain script the chief reports."""
        context = self.context
        if context is None:
            library_report(metrics, evaluated, step=step, evaluates=evaluates)
            return
        self.step = max(self.step, step)
        if context.distributed.rank != 0:
            return
        if not evaluates and context.info is not None:
            evaluated = {**metrics, **evaluated}
        groups = (
            (metrics, context.train.report_training_metrics),
            (evaluated, context.train.report_validation_metrics),
        )
        try:
            for values, report in groups:
                if values:
                    report(step, {name: value for name, value in values.items() if name != "step"})
        except ValueError as error:
            # Libraries log a step again, as after a second evaluation: no reason to end training.
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Metrics of step %d are left out: %s", step, error)

    def should_preempt(self) -> bool:
        """Return whether to save and leave; all ranks call equally often."""
        context = self.context
        return train.should_preempt() if context is None else context.preempt.should_preempt()

    def keep_checkpoint(self, place: Path, step: int, *, stores: bool) -> None:
        """Record a library's checkpoint as one of the run; all ranks call.

        Args:
            place: The library's file or directory.
            step: The steps of the optimizer that it has completed.
            stores: Whether the run's storage gets a copy. Else it gets the path.
        """
        context = self.context
        assert context is not None
        # Each rank writes its own part into the directory.
        context.distributed.allgather(None)
        if context.distributed.rank != 0:
            return
        place = place.absolute()
        metadata = {"steps_completed": step, "path": str(place)}
        with context.checkpoint.store_path(metadata) as (path, _):
            if not stores:
                (path / _POINTER).write_text(str(place))
            elif place.is_dir():
                shutil.copytree(place, path / place.name)
            else:
                shutil.copy2(place, path / place.name)

    def latest_checkpoint(self) -> str | None:
        """Return the path of the library's checkpoint to resume from; None at a fresh start.

        Raises:
            FileNotFoundError: It was recorded by its path, and is gone.
        """
        context = self.context
        assert context is not None
        uuid = context.latest_checkpoint
        if uuid is None:
            return None
        place = Path(str(context.checkpoint.get_metadata(uuid).get("path", "")))
        if place.is_absolute() and place.exists():
            return str(place)
        self._files = TemporaryDirectory(prefix="paceline-library-")
        context.checkpoint.download(uuid, self._files.name)
        stored = Path(self._files.name) / place.name
        if not place.name or not stored.exists():
            raise FileNotFoundError(
                f"The checkpoint to resume from must be at {str(place)!r}, but nothing is there."
                " Hint: put it back, or train with `store_checkpoints=True`, which keeps a copy."
            )
        return str(stored)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, as failed if there is an error; a given context stays open."""
        context, self._own = self._own, None
        self.is_training = False
        if context is not None:
            atexit.unregister(self._end_with_process)
            context.__exit__(type(error), error, None)

    def _end_with_process(self) -> None:
        error = getattr(sys, "last_value", None) if self.is_training else None
        # Without an error it is unknown how training has ended: no end is recorded then.
        if error is not None or not self.is_training:
            self.close(error)


def split_by_names(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics of training, and those that an evaluation has named; both keep `epoch`."""
    evaluated = {name: value for name, value in metrics.items() if name.startswith(EVALUATED)}
    trained = {name: value for name, value in metrics.items() if name not in evaluated}
    epoch = {name: value for name, value in metrics.items() if name == "epoch"}
    return (trained if trained != epoch or not evaluated else {}), (evaluated and evaluated | epoch)
