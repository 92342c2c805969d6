"""Trainer of config objects: trains the described run, also one from a YAML file."""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline import LOG_FORMAT, pytorch
from paceline.config._fields_and_problems import ConfigError
from paceline.config._read_yaml import apply_overrides, parse_yaml
from paceline.core._exceptions import NonFiniteError
from paceline.core._launcher_place import launched_place
from paceline.core._run_opening import run_name
from paceline.data._torch_loaders import to_device
from paceline.declarative._built_trainer import BuiltTrainer
from paceline.declarative._config_object import InferenceConfig, PretrainingConfig, TrainingConfig
from paceline.declarative._config_values import ObjectFinder
from paceline.declarative._losses import LossTracker
from paceline.declarative._saved_outputs import load_weights
from paceline.declarative._training_step import collate_of, form_of
from paceline.pytorch._fit_arguments import is_test_mode
from paceline.pytorch._training_loop import DrivenLoop

logger = logging.getLogger(__name__)


class Tester:
    """Run a model over a data set, batch by batch: `tester.build()`, then `tester.run()`.

    Override `update_result_holders` to keep what you need.

    Args:
        configs: The config.

    Raises:
        TypeError: `configs` is no `InferenceConfig`.
        ValueError: A field is missing; all missing ones are named.
    """

    def __init__(self, configs: InferenceConfig) -> None:
        if not isinstance(configs, InferenceConfig):
            raise TypeError(f"`configs` must be an InferenceConfig, but got {configs!r}.")
        needed = ("model_class", "dataset", "pretrained_model_path")
        if missing := [f"`{name}`" for name in needed if getattr(configs, name) is None]:
            raise ValueError(f"The config must be complete, but lacks {', '.join(missing)}.")
        self.configs = configs
        self.model: nn.Module
        self.dataloader: DataLoader[Any]

    def build(self) -> None:
        """Make the loader and the model, with its weights, and the directory for output.

        Raises:
            FileNotFoundError: There is no file of weights.
            ValueError: It is of another model, or the data do not fit the config.
        """
        configs = self.configs
        is_cuda = torch.cuda.is_available() and not configs.cpu_only
        self.device = torch.device("cuda" if is_cuda else "cpu")
        collate = collate_of(
            form_of(
                configs.dataset,
                "dataset",
                configs.data_label_separation_index,
                configs.leading_sample_axis,
            )
        )
        self.dataloader = DataLoader(
            configs.dataset, batch_size=configs.batch_size_per_process, collate_fn=collate
        )
        model: nn.Module = configs.model_class(**configs.model_params.values())
        assert configs.pretrained_model_path is not None
        load_weights(model, configs.pretrained_model_path)
        self.model = model.to(self.device).eval()
        if configs.prediction_output_path is not None:
            Path(configs.prediction_output_path).mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Hand the predictions and labels of each batch to `update_result_holders`, in order.

        Raises:
            RuntimeError: `build` was not called before.
        """
        if "model" not in vars(self):
            raise RuntimeError("`run` must follow `build`, but that was not called.")
        index = self.configs.data_label_separation_index
        postprocess = self.configs.prediction_postprocessor
        for batch in self.dataloader:
            items = [to_device(item, self.device) for item in batch]
            with torch.no_grad():
                returned = self.model(*items[:index])
            preds = _as_tuple(returned)
            if postprocess is not None:
                preds = _as_tuple(postprocess(preds))
            self.update_result_holders(preds, tuple(items[index:] if index else ()))

    def update_result_holders(self, preds: tuple[Tensor, ...], labels: tuple[Any, ...]) -> None:
        """Process a batch's predictions and labels; does nothing by default.

        Args:
            preds: The predictions, after `prediction_postprocessor`.
            labels: The labels, without any if there are none.
        """


def _as_tuple(returned: Any) -> tuple[Tensor, ...]:
    if isinstance(returned, Tensor):
        return (returned,)
    return tuple(returned.values() if isinstance(returned, Mapping) else returned)


def check_finite_weights(model: torch.nn.Module, num_batches: int) -> None:
    """Refuse weights that a loss which is not finite has left; losses of an own loop are not known.

    Raises:
        NonFiniteError: Some parameter has such values.
    """
    for name, parameter in model.named_parameters():
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not torch.isfinite(values).all():
            raise NonFiniteError(
                f"The training loss must be finite, but `run_training_epoch` left `{name}` NaN or"
                f" infinite after {num_batches} batches. Hint: resume from the last checkpoint with"
                " a smaller learning rate or gradient clipping; stop_on_nan=False trains on.",
                batch=num_batches,
            )


class TrainingBatches:
    """The rest of an epoch, for a loop in `run_training_epoch`; else the same as the loader.

    Args:
        loader: The loader.
        batches: This process's batches of the epoch.
        count: Returns how many there are.

    Attributes:
        is_begun: Whether the loop has begun.
    """

    def __init__(
        self, loader: "DataLoader[Any]", batches: Iterator[Any], count: Callable[[], int]
    ) -> None:
        self.is_begun = False
        self._loader = loader
        self._batches = batches
        self._count = count
        self._num_batches: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._num_batches is None:
            self._num_batches = self._count()
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        if self.is_begun:
            raise RuntimeError(
                "`run_training_epoch` must go through `training_dataloader` once, but does so"
                " again. Hint: a larger `num_epochs` trains for longer."
            )
        self.is_begun = True
        # A loop that has ended may ask how many there were; the batches of a stream have no number.
        with suppress(TypeError):
            len(self)
        return self._batches


class Trainer(BuiltTrainer):
    """Trainer of a config: `trainer.build()`, then `trainer.run_training()`.

    Override methods that do not fit. `process_data_loader_yield`, `move_to_device`,
    `load_data_and_get_loss`, `compute_losses`, `get_pred_dict` and `run_model_update_step` make up
    a training step; `run_training_epoch`, `run_validation` and `run_test` an epoch; the `build_`
    methods run in the order in which `build` calls them. Each may call `super()`, or do without in
    plain PyTorch.

    Args:
        configs: The config; as a trial of a master, its hyperparameters take the place of fields.
        rank: Not needed; refused unless it is the rank in the process group.
        num_processes: Not needed, like `rank`.

    Attributes:
        configs: The config in use: the one given, or a copy with hyperparameters.
        loss_tracker: The history of the losses.
        current_epoch: The epoch that is trained, from 0.
        verbose: Whether the losses of each epoch are logged.
        run_name: The run's name; None, the default, for the script's name.
        trackers: Other displays of the run, such as "mlflow", see `core.init`; set it before
            `build`.
        is_finished: Whether the training has come to its end; False if it was asked to leave.

    Raises:
        TypeError: `configs` is no `TrainingConfig`, or a class does not take its arguments.
        ValueError: A field is missing, or does not fit another one; all missing ones are named.
    """

    # ---- training ------------------------------------------------------------------------

    def run_training(self) -> LossTracker:
        """Train to the last epoch, and write the final model; its files are there for all ranks.

        When the run is asked to leave, by a signal, Ctrl-C or a master, the state is stored and
        this returns with `is_finished` False. In the test mode of `paceline experiment create`, one
        batch is trained, one validated, and a checkpoint stored.

        Returns:
            The history of the losses.

        Raises:
            RuntimeError: `build` was not called before.
        """
        if not self._is_built:
            raise RuntimeError("`run_training` must follow `build`, but that was not called.")
        self._is_built = False
        self.context.stepper.calls.has_begun = True
        # The run ends here, and takes the signal to leave as such.
        with self._stack:
            if is_test_mode():
                self._engine.fit(test_mode=True)
                return self.loss_tracker
            self.set_earlier_files_aside()
            if self.current_epoch >= self.num_epochs:
                self._say(
                    "All %d epochs are trained already; a larger `num_epochs` continues.",
                    self.num_epochs,
                )
            while self.current_epoch < self.num_epochs and not self._is_patience_over():
                self._train_epoch()
                self._evaluate_epoch()
                self.num_epochs_done = self.current_epoch + 1
                self._end_epoch()
                self.current_epoch += 1
            self.update_saved_model("final_model.pth")
            # The chief alone writes these files; other ranks return once they are there.
            self.context.distributed.broadcast(None)
            self.is_finished = True
        if not self.is_finished:
            self._say("Left in epoch %d with the state stored.", self.current_epoch + 1)
        return self.loss_tracker

    def run_training_epoch(self) -> None:
        """Train for the rest of the epoch.

        A loop of your own goes through `self.training_dataloader` once. It gets this process's
        batches in the order of the trainer, also after a resume; the scheduler steps between them.
        """
        metrics = self._engine.train_for(
            pytorch.Epoch(1),
            of=pytorch.Epoch(self.num_epochs),
            stop_on_nan=self.configs.stop_on_nan,
            verify_steps=self.configs.verify_steps,
            on_mismatch=self.configs.on_mismatch,
        )
        self._note_rates()
        self._note_metrics(metrics, "train", "loss")
        _call(self.configs.post_training_epoch_hook)

    def run_validation(self) -> None:
        """Validate, and save the model if the loss is the best so far."""
        before = self.loss_tracker["best_val_loss"]
        metrics = self._engine.validate()
        if self._note_metrics(metrics, "val", "val_loss"):
            logger.info("The validation loss fell from %.5g to %.5g.", before, metrics["val_loss"])
            self.update_saved_model("best_model.pth")
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(metrics["val_loss"])
        _call(self.configs.post_validation_epoch_hook)

    def run_test(self) -> None:
        """Evaluate the test set; nothing depends on the result."""
        self._trial.part = "test"
        try:
            metrics = self._engine.evaluate(self.test_dataloader)
        finally:
            self._trial.part = "train"
        self._note_metrics(metrics, "test", "test_loss")
        if self.rank == 0:
            self.context.core.train.report_metrics("test", self._engine.steps_completed, metrics)
        _call(self.configs.post_test_epoch_hook)

    # ---- small parts ---------------------------------------------------------------------

    def get_model_object(self) -> nn.Module:
        """Return the model itself, without a wrapper."""
        return self._plain_model

    def communicate_value_across_ranks(self, var: Any, mode: str = "average") -> Any:
        """Return the values of all ranks, averaged or as a list; all ranks call this.

        Args:
            var: This rank's value.
            mode: "average" for the mean, or "gather" for a list in the order of ranks.

        Raises:
            ValueError: `mode` is unknown.
        """
        if mode not in ("average", "gather"):
            raise ValueError(f"`mode` must be 'average' or 'gather', but got {mode!r}.")
        values = self.context.distributed.allgather(var)
        return values if mode == "gather" else sum(values) / len(values)

    def cleanup(self) -> None:
        """End the run if built but not trained, and release the model."""
        self._is_built = False
        self._stack.close()
        self.__dict__.pop("model", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _train_epoch(self) -> None:
        """Call `run_training_epoch`; ranks without samples learn the rates of the chief."""
        rates = self.loss_tracker["lrs"]
        num_before = len(rates)
        if self.is_overridden("run_training_epoch"):
            self._train_own_epoch()
        else:
            self.run_training_epoch()
        if self.context.distributed.size > 1:
            rates[num_before:] = self.context.distributed.broadcast(rates[num_before:])

    def _train_own_epoch(self) -> None:
        """Call `run_training_epoch` with the batches for a loop of its own.

        Raises:
            RuntimeError: It has trained on none.
            NonFiniteError: It has left weights that are not finite.
        """
        engine, loader = self._engine, self.training_dataloader
        before, sizes = engine.steps_completed, self._history_sizes()
        with engine.own_epoch(of=pytorch.Epoch(self.num_epochs)) as batches:
            batches = self._noting_rates(batches)
            self.training_dataloader = TrainingBatches(loader, batches, self._num_batches_left)
            try:
                self.run_training_epoch()
            finally:
                self.training_dataloader = loader
        if engine.steps_completed == before:
            raise RuntimeError(
                f"`{type(self).__name__}.run_training_epoch` must train on the trainer's batches,"
                " but has trained on none. Hint: `for batch in self.training_dataloader`, or"
                " super().run_training_epoch()."
            )
        if self.configs.stop_on_nan:
            check_finite_weights(self._plain_model, engine.steps_completed)
        self._check_scheduler()
        self._note_rates()
        if self.loss_tracker.current_epoch != self.current_epoch:
            self.loss_tracker["epochs"].append(self.current_epoch)
        self._report_own("training", ("loss", "train_acc_"), sizes)

    def _evaluate_epoch(self) -> None:
        """Call `run_validation` and `run_test`, with the model in the mode for them."""
        sizes = self._history_sizes()
        for model in self.context.models:
            model.eval()
        num_before = getattr(self.scheduler, "last_epoch", 0)
        self.run_validation()
        if self.is_overridden("run_validation"):
            self._check_scheduler()
            self._check_plateau(num_before)
            self._report_own("validation", ("val_loss", "val_acc_"), sizes)
        if self.test_dataset is not None:
            self.run_test()

    def _noting_rates(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self.configs.verify_steps is not None:
            raise ValueError(
                f"`verify_steps` must be None where `{type(self).__name__}.run_training_epoch` has"
                f" a loop of its own, but got {self.configs.verify_steps}. Hint: override"
                " `load_data_and_get_loss` or `run_model_update_step` instead."
            )
        for batch in batches:
            self._note_rates()
            yield batch

    def _note_rates(self) -> None:
        """Add the present learning rate for each batch missing in the rate history."""
        rates = self.loss_tracker["lrs"]
        while len(rates) < self._engine.steps_completed:
            rates.append(self.optimizer.param_groups[0]["lr"])

    def _num_batches_left(self) -> int:
        loop = self.context.loop
        assert isinstance(loop, DrivenLoop)
        return loop.num_shards_left()

    def _check_scheduler(self) -> None:
        for entry in self.context.lr_schedulers:
            entry.check_steps()

    def _check_plateau(self, num_before: int) -> None:
        """Refuse a second step by a `run_validation` of a subclass's own.

        Raises:
            RuntimeError: It took a step besides the step of `super().run_validation()`.
        """
        scheduler = self.scheduler
        is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if is_plateau and (num_steps := scheduler.last_epoch - num_before) > 1:
            raise RuntimeError(
                "ReduceLROnPlateau must step once in a validation, but"
                f" `{type(self).__name__}.run_validation` has stepped it {num_steps} times. Hint:"
                " super().run_validation() steps it; leave `self.scheduler.step` out."
            )

    def _history_sizes(self) -> dict[str, int]:
        return {k: len(v) for k, v in self.loss_tracker.items() if isinstance(v, list)}

    def _report_own(self, group: str, starts: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        """Report the values added to the history by a subclass's own method."""
        if self.rank != 0:
            return
        train, step = self.context.core.train, self._engine.steps_completed
        known = train.standing(group, step)
        grown = (name for name, size in self._history_sizes().items() if size > sizes.get(name, 0))
        news = {
            name: self.loss_tracker[name][-1]
            for name in grown
            if name.startswith(starts) and name not in known
        }
        if news:
            report = {
                "training": train.report_training_metrics,
                "validation": train.report_validation_metrics,
            }
            report[group](step, news)

    def _note_metrics(self, metrics: Mapping[str, Any], part: str, kind: str) -> bool:
        """Add an epoch's metrics to the history; return whether they are the best."""
        names = self._trial.names_of(part)
        losses = [metrics.get(name, metrics[names[0]]) for name in names]
        self.loss_tracker.update_accuracies(metrics, part)
        return self.loss_tracker.update_losses(losses, kind, self.current_epoch)

    def _end_epoch(self) -> None:
        if self.verbose and self.rank == 0:
            self.loss_tracker.print_losses()
        self.write_training_info()
        self.save_model_and_states_checkpoint()

    def _is_patience_over(self) -> bool:
        patience, tracker = self.configs.early_stopping_patience, self.loss_tracker
        if patience is None or not tracker["val_loss"]:
            return False
        return bool(self.current_epoch - 1 - tracker["epoch_best_val_loss"] >= patience)


def _call(hook: Callable[[], Any] | None) -> None:
    if hook is not None:
        hook()


_PACKAGE = "paceline.declarative"
_HINT = "--allow {module} if you trust it."
_KINDS: dict[str, type[TrainingConfig]] = {
    kind.__name__: kind for kind in (TrainingConfig, PretrainingConfig)
}


class RunFileError(ValueError):
    """Raised when a file describes no run."""


def load_run(
    path: str | os.PathLike[str],
    *,
    allowed_modules: Iterable[str] = (),
    overrides: Sequence[str] = (),
) -> TrainingConfig:
    """Return the config described by a YAML file, with overrides.

    A class is given by its import path, and an object, such as a loss or a data set, as
    ``{object: PATH, arguments: {...}}``. They may come from torch, from modules that lie beside the
    file, and from those that are allowed. ``config_class: PretrainingConfig`` chooses that class.

    Args:
        path: The file.
        allowed_modules: Packages and modules that may be imported as well.
        overrides: Fields to set, each as `field=value` or `model_params.width=value`.

    Raises:
        RunFileError: A field is unknown or wrong, or something cannot be found.
        FileNotFoundError: There is no such file.
    """
    file = Path(path)
    text = _text_of(file)
    directory = str(file.absolute().parent)
    if directory not in sys.path:
        # Modules beside the file are importable, like those beside a script.
        sys.path.insert(0, directory)
    beside = [entry.stem for entry in file.absolute().parent.iterdir() if _is_module(entry)]
    try:
        data = apply_overrides(_parsed(text, file), overrides)
        # A file that a run has written names the module too.
        name = str(data.pop("config_class", "TrainingConfig")).rpartition(".")[2]
        if name not in _KINDS:
            raise RunFileError(
                f"`config_class` must be {' or '.join(_KINDS)}, but got {name!r}: {file}."
            )
        config = _KINDS[name]()
        config.load_found(data, ObjectFinder({}, (*beside, *allowed_modules), _PACKAGE, _HINT))
    except (ConfigError, ValueError, TypeError) as error:
        if not is_explained(error):
            # User code raised the error: its traceback is needed.
            raise
        raise RunFileError(f"{file} must describe a run, but: {error}") from error
    return config


def _text_of(file: Path) -> str:
    if not file.exists():
        raise FileNotFoundError(f"The file that describes a run must exist, but {file} does not.")
    if not file.is_file():
        raise RunFileError(f"{file} must be a file that describes a run, but is none.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunFileError(f"{file} must be text in UTF-8, but is not: {error}.") from error


def _parsed(text: str, file: Path) -> dict[str, Any]:
    if file.suffix != ".json":
        return parse_yaml(text, file_name=str(file))
    # YAML takes 1e-05 for text.
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RunFileError(f"{file} must be JSON, but is not: {error}.") from error
    if not isinstance(data, dict):
        raise RunFileError(f"{file} must hold a map of fields, but holds {data!r}.")
    return data


def is_explained(error: BaseException) -> bool:
    """Return whether an error was raised by this package and needs no traceback.

    Errors of the user's own code, or of this package, need their traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    is_ours = Path(last.filename).is_relative_to(Path(paceline.__file__).parent)
    return is_ours and (last.line or "").startswith("raise ")


def _is_module(entry: Path) -> bool:
    is_package = entry.is_dir() and (entry / "__init__.py").exists()
    return (entry.suffix == ".py" or is_package) and entry.stem.isidentifier()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the run described by a YAML file, and return the exit code.

    Raises:
        RunFileError: The file describes no run.
    """
    parser = argparse.ArgumentParser(
        prog="python3 -m paceline.declarative",
        description="Run the training that a YAML file describes.",
    )
    parser.add_argument("file", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="FIELD=VALUE", help="values for fields of the file"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="also allow classes from MODULE",
    )
    given = parser.parse_intermixed_args(arguments)
    for override in given.overrides:
        if "=" not in override:
            parser.error(f"{override!r} must be a field and its value, such as num_epochs=5")
    place = launched_place()
    # Info messages come from rank 0 only; warnings and errors come from every rank.
    is_chief = place is None or place.rank == 0
    logging.basicConfig(level=logging.INFO if is_chief else logging.WARNING, format=LOG_FORMAT)
    config = load_run(given.file, allowed_modules=given.allow, overrides=given.overrides)
    trainer = Trainer(config)
    trainer.run_name = run_name(given.file)
    trainer.build()
    trainer.run_training()
    return 0
