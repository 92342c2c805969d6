"""A train function as a trainable of Ray Tune."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ray import tune
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from paceline._training.workers.ray.placement import trainable_name, trial_resources
from paceline.train._results import Report
from paceline.train._run_protocol import Checkpoint
from paceline.train._stepwise_and_class_runs import StepwiseRun
from paceline.train._trainer import Trainer
from paceline.train._trainer_arguments import CheckpointStrategy

_RUN_FOLDER = "paceline_run"
_RESTORED_FOLDER = "paceline_restored"
# A trial resumes from its newest checkpoint. The other one is for a failure while that is stored.
_NUM_TO_KEEP = 2


class TrainTrainable(tune.Trainable):
    """Train function in the workers of a trial; `to_trainable` makes a subclass.

    Each report of the chief is a result of the trial. The function waits at it until Tune has
    decided, so a trial that is paused, stopped or copied has trained no further. A checkpoint that
    the function has saved becomes one of Tune's with the next report.

    Attributes:
        trainer: The trainer, not started; each trial makes its own copy.
        function: The train function.
    """

    trainer: Trainer
    function: Callable[..., Any]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the placement group of a trial.

        Raises:
            ResourcesError: The cluster can never run the workers of a trial.
        """
        return trial_resources(cls.trainer.ray_bundles())

    def setup(self, config: dict[str, Any], dataset: Any = None) -> None:
        """Make the trial's trainer; its workers start with the first step."""
        self._config = config
        self._dataset = dataset
        self._own = type(self).trainer.replace()
        self._run: StepwiseRun | None = None
        self._start: Checkpoint | None = None
        self._known: dict[int, dict[str, Any]] = {}
        self._last: dict[str, Any] = {}
        self._evaluated: dict[str, Any] = {}
        self._told_uuid: str | None = None

    def step(self) -> dict[str, Any]:
        """Let the function continue to its next report, and return the report."""
        run = self._run
        if run is None:
            run = self._run = self._begin()
        report = next(run, None)
        result = self._last if report is None else self._result_of(report)
        if report is None:
            # Exceptions of the function: `get_results` raises them here.
            run.get_results()
            result = {**result, DONE: True, RESULT_DUPLICATE: True}
        self._last = result
        latest = run.latest_checkpoint
        if latest is not None and latest.uuid != self._told_uuid:
            self._told_uuid = latest.uuid
            result = {**result, SHOULD_CHECKPOINT: True}
        return result

    def _result_of(self, report: Report) -> dict[str, Any]:
        """Return the report; a library's report plus its last evaluation, needed by Tune."""
        if isinstance(report.validation, dict):
            self._evaluated |= report.validation
        return {**report, **({} if report.validation is True else self._evaluated)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the function's newest checkpoint, or note its place if reachable for others."""
        checkpoint, recent = self._start, self._known
        if self._run is not None:
            checkpoint, recent = self._run.latest_checkpoint or checkpoint, self._run.recent
        facts: dict[str, Any] = {"uuid": None, "url": None, "recent": recent}
        if checkpoint is not None:
            facts["uuid"] = checkpoint.uuid
            if self._own.has_given_storage:
                facts["url"] = checkpoint.url
            else:
                _copy_checkpoint(checkpoint.path, Path(checkpoint_dir) / checkpoint.uuid)
        (Path(checkpoint_dir) / Checkpoint.tune_file).write_text(json.dumps(facts))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Make the function resume from the checkpoint stored by `save_checkpoint`."""
        self._end_run()
        self._begin_anew()
        directory = Path(checkpoint_dir)
        facts = json.loads((directory / Checkpoint.tune_file).read_text())
        self._known = {int(number): metrics for number, metrics in facts["recent"].items()}
        self._told_uuid = facts["uuid"]
        if facts["url"] is not None:
            self._start = Checkpoint.from_path(facts["url"])
        elif facts["uuid"] is not None:
            # Tune removes its copy once this returns.
            folder = self._folder(_RESTORED_FOLDER)
            _copy_checkpoint(directory / facts["uuid"], folder / facts["uuid"])
            self._start = Checkpoint.from_path(folder / facts["uuid"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Continue as another trial, with the same workers."""
        self._end_run()
        self._begin_anew()
        self._config = new_config
        return True

    def cleanup(self) -> None:
        """End the workers."""
        self._own.shutdown(force=True)

    # ---- runs ----------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self._start, self._known = None, {}
        self._last, self._told_uuid = {}, None
        self._evaluated = {}

    def _begin(self) -> StepwiseRun:
        return self._own.run_stepwise(
            type(self).function,
            self._config,
            self._dataset,
            self._start,
            CheckpointStrategy(num_to_keep=_NUM_TO_KEEP),
            known=self._known,
            run_dir=self._folder(_RUN_FOLDER),
        )

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    def _folder(self, name: str) -> Path:
        """Return a path in the trial's directory, after removing anything left there."""
        path = Path(self.logdir) / name
        shutil.rmtree(path, ignore_errors=True)
        return path


def to_trainable(
    trainer: Trainer, function: Callable[..., Any], dataset: Any = None
) -> type[TrainTrainable]:
    """Return a train function as a trainable of Ray Tune; see `Trainer.to_trainable`."""
    members = {
        # Tune restarts a trial whose workers were lost, if its `FailureConfig` says so.
        "trainer": trainer.replace(cluster="ray", max_retries=0, run_dir=None),
        "function": staticmethod(function),
    }
    trainable: Any = type(trainable_name(function, "train_func"), (TrainTrainable,), members)
    if dataset is not None:
        trainable = tune.with_parameters(trainable, dataset=dataset)
    return cast("type[TrainTrainable]", trainable)


def _copy_checkpoint(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link_checkpoint_file)


def _link_checkpoint_file(source: str, target: str) -> None:
    """Link an unchanging file of a checkpoint to a second name; copy the file if links fail."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
