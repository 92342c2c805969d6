"""PyTorch Lightning, in train functions and in plain scripts."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import core, train
from paceline._base.imports import required_library
from paceline.integrations._library_reports import LibraryRun, library_report, split_by_names

required_library("lightning.pytorch", "prepare_lightning", "lightning")

import lightning.pytorch as pl  # noqa: E402  # after the check that it is there
from lightning.pytorch.callbacks import Checkpoint  # noqa: E402
from lightning.pytorch.loggers import Logger  # noqa: E402
from lightning.pytorch.plugins import CheckpointIO  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.utilities import rank_zero_only  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

# Path given to Lightning for a checkpoint of the run.
_PLACE = "paceline"
_KEY = "lightning"


def lightning_trainer(
    *, every_n_epochs: int | None = 1, every_n_steps: int | None = None, **arguments: Any
) -> pl.Trainer:
    """Return a Lightning trainer for all workers of a run, prepared by `prepare_lightning`.

    Gradients are averaged as `train.prepare_model` does it. Each worker is one device of Lightning.

    Args:
        every_n_epochs: See `prepare_lightning`.
        every_n_steps: See `prepare_lightning`.
        arguments: Arguments of Lightning's `Trainer`, without `accelerator`, `devices`, `num_nodes`
            and `strategy`. Lightning's own checkpoints, its logger and its progress bar are off by
            default.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: An argument says where to train, which the workers do.
    """
    given = sorted(arguments.keys() & {"accelerator", "devices", "num_nodes", "strategy"})
    if given:
        raise TypeError(
            f"`lightning_trainer` trains where the workers are, but got {', '.join(given)}. Hint:"
            " leave it out, or make a `Trainer` of Lightning and call `prepare_lightning`."
        )
    own = any(isinstance(each, Checkpoint) for each in _as_list(arguments.get("callbacks")))
    arguments = {
        "enable_checkpointing": own,
        "logger": False,
        "enable_progress_bar": False,
        **arguments,
    }
    device = train.get_device()
    arguments["accelerator"] = "gpu" if device.type == "cuda" else device.type
    arguments["devices"] = 1
    if train.world_size() > 1:
        num_local = int(os.environ["LOCAL_WORLD_SIZE"])
        arguments["devices"] = num_local
        arguments["num_nodes"] = train.world_size() // num_local
        arguments["strategy"] = LightningWorkersStrategy(
            cluster_environment=LightningWorkersEnvironment()
        )
    trainer = pl.Trainer(**arguments)
    return prepare_lightning(trainer, every_n_epochs=every_n_epochs, every_n_steps=every_n_steps)


def prepare_lightning(
    trainer: pl.Trainer, *, every_n_epochs: int | None = 1, every_n_steps: int | None = None
) -> pl.Trainer:
    """Make a Lightning trainer report, save checkpoints of the run, and resume from the last.

    Metrics that the model logs are reported at the end of each epoch, and every
    `log_every_n_steps` steps; metrics of a validation once. A search judges the validated metrics,
    and all metrics if there are none. `fit` without `ckpt_path` resumes from the run's checkpoint.
    When the run is to make room, a checkpoint is saved after the present step, and training ends.

    Args:
        trainer: The trainer; its strategy must use the processes that the workers are.
        every_n_epochs: Save a checkpoint after so many epochs; None for never.
        every_n_steps: Save one after so many steps of the optimizer too. Give `fit` loaders of
            `train.prepare_data_loader` then: only these resume within an epoch.

    Returns:
        The same trainer.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: It is no trainer of the package `lightning`.
        ValueError: A number is below 1, or the trainer has a `PacelineLogger` as well.
    """
    if not isinstance(trainer, pl.Trainer):
        kind = type(trainer)
        raise TypeError(
            "`trainer` must be a lightning.pytorch.Trainer, but is a"
            f" {kind.__module__}.{kind.__qualname__}. Hint: import lightning.pytorch as pl."
        )
    for name, value in (("every_n_epochs", every_n_epochs), ("every_n_steps", every_n_steps)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1 or None, but got {value!r}.")
    if any(isinstance(each, PacelineLogger) for each in trainer.loggers):
        raise ValueError(
            "`trainer` must have no PacelineLogger, as a prepared trainer reports by itself. Hint:"
            " leave out `logger`."
        )
    state = train.load_checkpoint()
    stored = state.get(_KEY) if isinstance(state, Mapping) else None
    trainer.strategy.checkpoint_io = _LightningCheckpoints(trainer.strategy.checkpoint_io, stored)
    if stored is not None:
        trainer.ckpt_path = _PLACE
        # Sanity validation off on a resume: it would restore the random state from before itself.
        trainer.num_sanity_val_steps = 0
    trainer.callbacks.append(_LightningCallback(every_n_epochs, every_n_steps))
    return trainer


class PacelineLogger(Logger):  # type: ignore[misc]  # Lightning has no types
    """Logger for `Trainer(logger=PacelineLogger())` of Lightning, in scripts of any launcher.

    Metrics with names that begin with `val`, `test` or `eval` are of validation, all others of
    training. The first process begins a run of `core.init`, which ends with the process. The files
    of a `ModelCheckpoint` become checkpoints of the run. In a train function it only
    reports, to that run; `lightning_trainer` does more there.

    Args:
        context: A context of `core.init` to report to; you close it.
        store_checkpoints: Whether the run's storage gets a copy of what Lightning saves. By default
            a checkpoint of the run has the path alone, as metadata.
        options: Arguments of `core.init` for a run of its own, such as `name`.
    """

    def __init__(
        self,
        context: core.Context | None = None,
        *,
        store_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        self._run = LibraryRun(context, options, is_chief_alone=True)
        self._stores = store_checkpoints
        # Names a directory of Lightning. The run's name would need the run, before its parameters.
        self._version = time.strftime("%Y%m%d-%H%M%S")

    @property
    def name(self) -> str:
        """The name of the directory for files of Lightning's own."""
        return "paceline"

    @property
    def version(self) -> str:
        """The directory below it, by the time of the start."""
        return self._version

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Begin the run with the hyperparameters of the model."""
        self._run.set_hparams(params if isinstance(params, Mapping) else vars(params))
        self._run.begin()

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Report metrics."""
        trained, evaluated = split_by_names(metrics)
        # Lightning counts steps from 0, and logs the metrics of a step with its number.
        self._run.report(trained, evaluated, step=self._run.step if step is None else step + 1)
        self._run.is_training = self._run.context is not None

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Record a file as a checkpoint of the run; Lightning calls it in the first process."""
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        if path and self._run.context is not None:
            self._run.keep_checkpoint(Path(path), self._run.step, stores=self._stores)

    @rank_zero_only  # type: ignore[untyped-decorator]
    def finalize(self, status: str) -> None:
        """End the run if training has failed; else it ends with the process."""
        self._run.is_training = False
        if status == "failed":
            self._run.close(sys.exc_info()[1])


class LightningWorkersEnvironment(LightningEnvironment):  # type: ignore[misc]  # Lightning has no types
    """Cluster environment of Lightning: the workers of the run are its processes."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the processes are there already: they are."""
        return True

    def world_size(self) -> int:
        """Return the number of workers."""
        return train.world_size()

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return train.world_rank()

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return train.local_rank()

    def node_rank(self) -> int:
        """Return the number of this worker's node."""
        return train.node_rank()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the run has set the world size."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the run has set the rank."""

    def teardown(self) -> None:
        """Leave the variables of the worker as they are."""


class LightningWorkersStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning has no types
    """Lightning's strategy for several processes, with gradients averaged by the run.

    They are averaged over the samples of all workers in the order of the parameters, so that a run
    that resumes ends in the same bits with three workers and more too.
    """

    @property
    def root_device(self) -> Any:
        """The worker's device."""
        return train.get_device()

    def _setup_model(self, model: Any) -> Any:
        return train.prepare_model(model, move_to_device=False)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: they are for Lightning's own way."""


class _LightningCheckpoints(CheckpointIO):  # type: ignore[misc]  # Lightning has no types
    """Checkpoint I/O of Lightning; checkpoints of the run go to the run's storage."""

    def __init__(self, others: CheckpointIO, stored: Any) -> None:
        self._others = others
        self._stored = stored

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if str(path) == _PLACE:
            # Pickle allowed: a model may keep any objects among its hyperparameters.
            train.save_checkpoint({_KEY: checkpoint}, allow_pickle=True)
        else:
            self._others.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path) == _PLACE:
            return self._stored
        return self._others.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self._others.remove_checkpoint(path)

    def teardown(self) -> None:
        self._others.teardown()


class _LightningCallback(Checkpoint):  # type: ignore[misc]  # Lightning has no types
    """Callback for reports and checkpoints; Lightning calls checkpoint callbacks last."""

    def __init__(self, every_n_epochs: int | None, every_n_steps: int | None) -> None:
        self._every_n_epochs = every_n_epochs
        self._every_n_steps = every_n_steps
        self._start_step = self._saved_step = -1
        self._is_reported = False
        # The tensors of the last validation. Lightning keeps them beside the tensors of training.
        self._evaluated: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._fresh: dict[str, Any] = {}
        self._trained: set[str] = set()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # The model is with its worker, and no iteration has begun.
        train.restore_random_state()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # Lightning repeats the end of the epoch that it resumes after.
        self._start_step = self._saved_step = trainer.global_step

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        _end_iterations(trainer.val_dataloaders)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._known = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        _end_iterations(trainer.val_dataloaders)
        is_fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_fitting and trainer.global_step != self._start_step:
            known, found = self._known, trainer.callback_metrics
            self._fresh = {name: new for name, new in found.items() if new is not known.get(name)}
            self._evaluated |= self._fresh

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._fresh:
            self._is_reported = False
            self._report(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if trainer.is_last_batch:
            _end_iterations(trainer.train_dataloader)
        self._is_reported = False
        if step != self._saved_step and step % trainer.log_every_n_steps == 0:
            self._report(trainer)
        every = self._every_n_steps
        is_due = every is not None and step % every == 0
        self._save_or_leave(trainer, is_due=is_due and step != self._saved_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step == self._start_step:
            return
        self._is_reported = False
        self._report(trainer)
        every = self._every_n_epochs
        is_due = every is not None and (trainer.current_epoch + 1) % every == 0
        self._save_or_leave(trainer, is_due=is_due)

    def _save_or_leave(self, trainer: pl.Trainer, *, is_due: bool) -> None:
        """Save if due or if the run is preempted; a preemption also ends training."""
        is_preempted = train.should_preempt()
        if is_due or (is_preempted and trainer.global_step != self._saved_step):
            self._save(trainer)
        if is_preempted:
            trainer.should_stop = True

    def _report(self, trainer: pl.Trainer) -> None:
        if self._is_reported:
            return
        self._is_reported = True
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics = {
            name: value.item()
            for name, value in trainer.callback_metrics.items()
            if self._evaluated.get(name) is not value
        }
        fresh = {name: value.item() for name, value in self._fresh.items()}
        self._fresh = {}
        self._trained |= metrics.keys()
        # A name of training has the value of training in the report.
        apart = {name: value for name, value in fresh.items() if name not in self._trained}
        library_report(
            metrics | apart | place,
            fresh and fresh | place,
            step=trainer.global_step,
            evaluates=trainer.enable_validation,
        )

    def _save(self, trainer: pl.Trainer) -> None:
        self._report(trainer)
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(_PLACE)
        if not trainer.is_global_zero:
            # The chief's state serves all; this adds the rank's own part.
            train.save_checkpoint()


def _end_iterations(loaders: Any) -> None:
    """End iterations over prepared loaders: Lightning counts batches, and never asks for the end.

    A checkpoint then has the beginning of the next epoch, and not the end of this one.
    """
    for loader in tree_leaves(loaders):
        if hasattr(loader, "end_iteration"):
            loader.end_iteration()


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
