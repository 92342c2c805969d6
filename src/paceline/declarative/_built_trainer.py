"""Trainer as built from a config, step by step."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import core, pytorch
from paceline._training.engine.metric_reducers import ExplainedVariance
from paceline._training.engine.rank_differences import check_same_data
from paceline.core._run_opening import local_directory, resuming_by
from paceline.data._torch_loaders import mover_to
from paceline.declarative._config_object import TrainingConfig, with_hyperparameters
from paceline.declarative._losses import LossTracker, accuracy
from paceline.declarative._parts_from_config import (
    OwnBuilds,
    check_config_arguments,
    check_config_place,
    join_config_ranks,
    losses_of,
    make_optimizer,
    make_scheduler,
    num_epochs_of,
    num_launched_for_config,
    precision_of,
    predictions_of,
    recorded_fields,
    require_fields,
)
from paceline.declarative._saved_outputs import (
    CHECKPOINTS,
    SavedRun,
    check_save_dir,
    checkpoints_in,
    encoder_of,
    load_weights,
    read_state,
)
from paceline.declarative._training_step import form_of, loader_of, split

logger = logging.getLogger(__name__)


# The entry of a history in a checkpoint that is none of its lists.
_DONE = "num_epochs_done"


class ConfiguredTrial(pytorch.PyTorchTrial):
    """Trial for the engine: calls the trainer's methods per batch and names their results.

    Args:
        trainer: The trainer, with its data and loss built.

    Attributes:
        part: The part whose metrics are reported now: "train", "val" or "test".
    """

    def __init__(self, trainer: "BuiltTrainer") -> None:
        self.part = "train"
        self._trainer = trainer
        terms = ["", *(f"_{term}" for term in trainer.loss_tracker.terms)]
        self._names = {
            "train": [f"loss{term}" for term in terms],
            "val": [f"val_loss{term}" for term in terms],
            "test": [f"test_loss{term}" for term in terms],
        }
        # The loss of an only prediction is the total, and is reported once.
        reports_one = trainer.reports_one_loss()
        self._reported = {
            part: names[: 1 if reports_one else None] for part, names in self._names.items()
        }
        self._is_plain = trainer.is_plain()
        self._rates: list[float] = trainer.loss_tracker["lrs"]
        wanted = trainer.configs.task_type or ""
        has_labels = trainer.configs.data_label_separation_index is not None
        by_kind: dict[str, list[int]] = {"cls": [], "regr": []}
        for index, prediction in enumerate(trainer.predictions if has_labels else ()):
            by_kind[prediction.kind].append(index)
        self._classified = by_kind["cls"] if "classification" in wanted else []
        self._estimated = by_kind["regr"] if "regression" in wanted else []
        self._measures_accuracy = bool(self._classified or self._estimated)
        names = [trainer.predictions[index].name for index in self._estimated]
        self._variance = ExplainedVariance(names, lambda name: f"{self.part}_acc_{name}")
        if names:
            trainer.context.wrap_reducer(self._variance)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train on a shard."""
        trainer = self._trainer
        if len(self._rates) < batch_idx:
            # The rate after the batch before, as schedulers step between the two.
            self._rates.append(trainer.optimizer.param_groups[0]["lr"])
        if self._is_plain:
            loss, preds, labels = trainer.train_plainly(batch)
            metrics: dict[str, Any] = {"loss": loss}
            if self._measures_accuracy:
                self._add_accuracies(metrics, preds, labels)
            return metrics
        records, loss, preds, labels = trainer.load_data_and_get_loss(
            batch, trainer.get_epoch_loss_buffer()
        )
        trainer.run_model_update_step(loss)
        return self._metrics(records, preds, labels)

    @property
    def own_code(self) -> "BuiltTrainer":
        """The kind of object that a user's own methods belong to."""
        return self._trainer

    def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Evaluate a batch."""
        trainer = self._trainer
        records, _, preds, labels = trainer.load_data_and_get_loss(
            batch, trainer.get_epoch_loss_buffer()
        )
        return self._metrics(records, preds, labels)

    def build_training_data_loader(self) -> Any:
        """Return the trainer's loader."""
        return self._trainer.training_dataloader

    def build_validation_data_loader(self) -> Any:
        """Return the trainer's loader."""
        return self._trainer.validation_dataloader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        """Return the callback for keeping the history in checkpoints."""
        return {"history": _History(self, self._trainer)}

    def names_of(self, part: str) -> list[str]:
        """Return the names of the losses of "train", "val" or "test", the total first."""
        return self._names[part]

    def _metrics(
        self, records: Sequence[Any], preds: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> dict[str, Any]:
        metrics = dict(zip(self._reported[self.part], records, strict=False))
        if self._measures_accuracy:
            self._add_accuracies(metrics, preds, labels)
        return metrics

    def _add_accuracies(
        self, metrics: dict[str, Any], preds: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> None:
        for index in self._classified:
            name, pred = self._trainer.predictions[index].name, preds[index]
            if pred.dim() < 2 or pred.shape[1] < 2:
                raise ValueError(
                    f"The prediction `{name}` of kind 'cls' must be [batch, classes] with two"
                    f" classes or more, but is {list(pred.shape)}. Hint: say 'regr' for a single"
                    " score, or task_type=None for no accuracy."
                )
            metrics[f"{self.part}_acc_{name}"] = accuracy(pred, labels[index])
        for index in self._estimated:
            self._variance.add(self._trainer.predictions[index].name, preds[index], labels[index])


class _History(pytorch.PyTorchCallback):
    """Callback to keep the loss history in checkpoints and report stored checkpoints."""

    def __init__(self, trial: ConfiguredTrial, trainer: "BuiltTrainer") -> None:
        self._trial = trial
        self._trainer = trainer

    def on_validation_start(self) -> None:
        self._trial.part = "val"

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._trial.part = "train"

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._trainer.note_checkpoint(uuid)

    def state_dict(self) -> dict[str, Any]:
        return {**self._trainer.loss_tracker.state_dict(), _DONE: self._trainer.num_epochs_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tracker = self._trainer.loss_tracker
        rates = tracker["lrs"]
        self._trainer.num_epochs_done = state_dict.pop(_DONE)
        tracker.load_state_dict(state_dict)
        # The trial appends to the list that it knows.
        rates[:] = tracker["lrs"]
        tracker["lrs"] = rates


class BuiltTrainer(OwnBuilds):
    """Builder of all training parts from a config, by overridable methods.

    Args:
        configs: The config; as a trial of a master, its hyperparameters take the place of fields.
        rank: Not needed; refused unless it is the rank in the process group.
        num_processes: Not needed, like `rank`.

    Raises:
        TypeError: `configs` is no `TrainingConfig`, or a class does not take its arguments.
        ValueError: A field is missing, or does not fit another one; all missing ones are named.
    """

    def __init__(
        self, configs: TrainingConfig, rank: int | None = None, num_processes: int | None = None
    ) -> None:
        if not isinstance(configs, TrainingConfig):
            raise TypeError(f"`configs` must be a TrainingConfig, but got {configs!r}.")
        info = core.get_cluster_info()
        hparams = {} if info is None else info.trial.hparams
        self.configs = with_hyperparameters(configs, hparams) if hparams else configs
        self._given_place = (rank, num_processes)
        self.is_finished = False
        self.verbose = True
        self.debug = configs.debug
        self.current_epoch = self.num_epochs_done = 0
        self.num_epochs = self.configs.num_epochs
        self._has_gone_on = False
        self.run_name: str | None = None
        self.trackers: Sequence[core.Tracker | str] = ()
        self._stack = ExitStack()
        self._is_built = False
        self.check_configs()

    # ---- building ------------------------------------------------------------------------

    def build(self) -> None:
        """Build all parts of the training, and begin the run.

        Raises:
            FileNotFoundError: `checkpoint_dir` or `pretrained_model_path` is not there.
            ValueError: The data, the weights or the launch do not fit the config.
            CheckpointMismatchError: The checkpoint is of another model.
            CheckpointCorruptError: The checkpoint is damaged.
        """
        if self._is_built:
            raise RuntimeError("`build` must be called once before each training.")
        # Whatever fails, the run is left as one that failed.
        with ExitStack() as stack:
            stack.push(self._stack)
            self.check_configs()
            self.forget_build()
            self._has_gone_on, self.current_epoch, self.num_epochs_done = False, 0, 0
            self.build_loss_tracker()
            self.require_built("loss_tracker", LossTracker)
            self._build_place()
            self._scale_parameters()
            self.build_scalable_parameters()
            self.build_device()
            self.check_device()
            self._take_datasets()
            self.build_split_datasets()
            if self.configs.check_ranks is not False:
                self._check_same_data()
            self.build_dataloaders()
            self.adopt_loaders()
            self.build_model()
            self.adopt_model()
            self.build_optimizer()
            self.adopt_optimizer()
            with self.counting_batches():
                self.build_scheduler()
            self.adopt_scheduler()
            self.build_dir()
            self.make_dir()
            self._make_engine()
            self.load_state_checkpoint()
            self._begin()
            self._is_built = True
            stack.pop_all()

    def check_configs(self) -> None:
        """Check the consistency of the config's fields.

        Raises:
            ValueError: Fields are missing, or do not fit.
            TypeError: A class does not take its arguments.
        """
        require_fields(self.configs)
        check_config_arguments(self.configs)
        self.predictions = predictions_of(self.configs)
        self._losses = losses_of(self.configs, self.predictions)

    def build_loss_tracker(self) -> None:
        """Make `loss_tracker`."""
        names = [prediction.name for prediction in self.predictions]
        self.loss_tracker = LossTracker(names, self._losses.terms)

    def build_ranks(self) -> None:
        """Find this process among the others, seed all generators, and begin the run."""
        configs, parallel = self.configs, self.configs.parallelization_params
        local_directory(
            configs.model_save_dir, "model_save_dir", "models and histories are written"
        )
        check_save_dir(configs.model_save_dir)
        self._is_managed = core.get_cluster_info() is not None
        is_single = parallel.parallelization_type == "single_node"
        # The processes that divide a model train on the same samples.
        size = max(1, num_launched_for_config(is_single=is_single) // parallel.tensor_parallel_size)
        distributed = None
        if configs.checkpoint_dir is not None:
            distributed = join_config_ranks(configs)
            self._stack.enter_context(distributed or nullcontext())
        self._stored = self._state_to_begin_with(distributed)
        stored = self._stored
        num_shards = None if stored is None else stored.num_shards
        is_cuda = torch.cuda.is_available() and not configs.cpu_only
        self._num_devices = torch.cuda.device_count() if is_single and is_cuda else 1
        all_samples = configs.batch_size_per_process * self._num_devices * (num_shards or size)
        storage = (
            configs.checkpoint_storage or Path(configs.model_save_dir).absolute() / CHECKPOINTS
        )
        with resuming_by(", or set `checkpoint_dir` to its `model_save_dir`"):
            self.context = self._stack.enter_context(
                pytorch.init(
                    distributed=distributed,
                    hparams={**recorded_fields(configs), "global_batch_size": all_samples},
                    seed=configs.random_seed if stored is None else stored.seed,
                    name=self.run_name,
                    trackers=self.trackers,
                    checkpoint_storage=None if self._is_managed else storage,
                    precision=precision_of(configs),
                    data_parallel=parallel.data_parallel,
                    shard_size=parallel.shard_size,
                    tensor_parallel_size=parallel.tensor_parallel_size,
                    num_shards=num_shards,
                    device="cpu" if configs.cpu_only else None,
                    check_ranks=configs.check_ranks,
                )
            )
        self._seed = self.context.get_trial_seed() if stored is None else stored.seed
        self._take_place()

    def _take_place(self) -> None:
        """Set rank, device and number of processes from the context."""
        self.rank, self.device = self.context.distributed.rank, self.context.device
        check_config_place(self._given_place, self.rank, self.context.distributed.size)
        # `move_to_device` moves a batch, so that it can be overridden.
        self.context.experimental.disable_auto_to_device()
        self._move = mover_to(self.device)
        self.context.accumulation.frequency = self.configs.accumulation_steps
        self.num_processes = self._num_devices * self.context.num_shards

    def _state_to_begin_with(self, distributed: core.DistributedContext | None) -> SavedRun | None:
        directory = self.configs.checkpoint_dir
        if directory is None:
            return None
        if self._is_managed:
            logger.warning("`checkpoint_dir` has no effect: the master chooses the checkpoint.")
            return None
        stored = read_state(directory, distributed)
        if self.configs.random_seed not in (None, stored.seed):
            raise ValueError(
                f"`random_seed` must be {stored.seed}, as with the checkpoint in"
                f" {str(directory)!r}, but got {self.configs.random_seed}. Hint: leave it out, or"
                " begin anew without `checkpoint_dir`."
            )
        return stored

    def build_scalable_parameters(self) -> None:
        """Multiply batch size and learning rate by the number of processes or GPUs.

        Set `learning_rate`, or `all_proc_batch_size` for the samples of all processes together.
        """
        self._scale_parameters()

    def _scale_parameters(self) -> None:
        self.all_proc_batch_size = self.configs.batch_size_per_process * self.num_processes
        self.learning_rate = self.configs.learning_rate_per_process * self.num_processes

    def build_device(self) -> None:
        """Return where the model is trained."""
        logger.info("Rank %d trains on %s.", self.rank, self.device)

    def build_split_datasets(self) -> None:
        """Make the data sets for training and validation, the same on every rank."""
        configs = self.configs
        if self.training_dataset is None or self.validation_dataset is None:
            self.training_dataset, self.validation_dataset = split(
                self.dataset, configs.validation_ratio, self._seed
            )

    def _take_datasets(self) -> None:
        configs = self.configs
        self.dataset = configs.dataset
        self.training_dataset = configs.training_dataset
        self.validation_dataset = configs.validation_dataset
        self.test_dataset = configs.test_dataset

    def _check_same_data(self) -> None:
        """Refuse data sets and splits with differences between ranks, before their use."""
        parts = ("training", "validation", "test")
        check_same_data(
            self.context.core.distributed,
            {part: getattr(self, f"{part}_dataset") for part in parts},
        )

    def build_dataloaders(self) -> None:
        """Make the loaders; each batch is a single process's share."""
        self.training_dataloader = self._loader("training_dataset", is_shuffled=True)
        self.validation_dataloader = self._loader("validation_dataset")
        if self.test_dataset is not None:
            self.test_dataloader = self._loader("test_dataset")

    def build_model(self) -> None:
        """Make the model and load its first weights, if there are any."""
        configs = self.configs
        model: nn.Module = configs.model_class(**configs.model_params.values())
        if configs.pretrained_model_path is not None:
            name, part = "", model
            if configs.load_pretrained_encoder_only:
                self._encoder_name, encoder = encoder_of(model)
                if not configs.load_pretrained_classifier:
                    name, part = self._encoder_name, encoder
            load_weights(part, configs.pretrained_model_path, name)
        self.model = self.wrap_model(model)
        if self._num_devices > 1:
            logger.info(
                "DataParallel uses %d GPUs in one process. One process for each is faster:"
                " parallelization_type='multi_node' and python3 -m"
                " paceline.launch.torch_distributed SCRIPT.",
                self._num_devices,
            )
            self.model = nn.DataParallel(model)

    def build_optimizer(self) -> None:
        """Make the optimizer, of parameter groups if they are given."""
        encoder = getattr(self._plain_model, self._encoder_name) if self._encoder_name else None
        self.optimizer = self.context.wrap_optimizer(
            make_optimizer(
                self.configs, self._plain_model, encoder, self.learning_rate, self._rate_scale()
            )
        )

    def build_scheduler(self) -> None:
        """Make the learning rate scheduler, if configured."""
        configs = self.configs
        if configs.scheduler is not None:
            self.scheduler = make_scheduler(
                configs, self.optimizer, self.iterations_per_epoch, self.context
            )

    def build_dir(self) -> None:
        """Make the output directory of the run."""
        self.make_dir()

    def load_state_checkpoint(self) -> None:
        """Resume from the state of the run or of `checkpoint_dir`."""
        if self._stored is not None:
            self._engine.restore(self._stored.place)
        self._go_on()

    def _build_place(self) -> None:
        """Call `build_ranks`, and begin the run if an override has not."""
        self.build_ranks()
        if "context" in vars(self):
            return
        own = vars(self).get("rank"), vars(self).get("num_processes")
        BuiltTrainer.build_ranks(self)
        check_config_place((own[0], None), self.rank, self.context.distributed.size)
        self.num_processes = self.num_processes if own[1] is None else own[1]

    def _make_engine(self) -> None:
        self._trial = ConfiguredTrial(self)
        self._engine = pytorch.Trainer(self._trial, self.context)
        config = self.context.get_experiment_config()
        self.num_epochs = num_epochs_of(config, self.configs.num_epochs)

    def _go_on(self) -> None:
        """Set the first epoch from the restored state."""
        self._has_gone_on = True
        if self._engine.steps_completed:
            self.current_epoch = self.num_epochs_done

    def _begin(self) -> None:
        if not self._has_gone_on:
            # The state of the run itself is restored, whatever an override has loaded.
            self._go_on()
        begun = self.context.core.latest_checkpoint
        if begun is None and self._stored is not None:
            begun = self._stored.uuids[-1]
        kept = checkpoints_in(self._save_dir)
        # Checkpoints of another run in this directory stay, outside of this run's retention.
        self._is_continued = begun in kept or (self._is_managed and begun is not None)
        self._kept = self._keep_newest(kept if begun in kept else [])
        if num_batches := self._engine.steps_completed:
            epoch = self.current_epoch + 1
            self._say("Going on after %d batches, in epoch %d.", num_batches, epoch)

    # ---- small parts ---------------------------------------------------------------------

    def _loader(self, name: str, *, is_shuffled: bool = False) -> Any:
        configs, dataset = self.configs, getattr(self, name)
        return loader_of(
            dataset,
            form_of(
                dataset, name, configs.data_label_separation_index, configs.leading_sample_axis
            ),
            num_workers=configs.num_workers,
            batch_size=self._shard_size(),
            is_shuffled=is_shuffled,
            pins=configs.pin_memory_for_dataloader and self.device.type == "cuda",
        )

    def _shard_size(self) -> int:
        """Return how many samples a process trains on at once.

        Raises:
            ValueError: `all_proc_batch_size` cannot be divided.
        """
        size, rest = divmod(self.all_proc_batch_size, self.context.num_shards)
        if rest or size < 1:
            raise ValueError(
                f"`all_proc_batch_size` must be a multiple of the {self.context.num_shards}"
                f" processes, but `build_scalable_parameters` has set {self.all_proc_batch_size}."
            )
        return size

    def _rate_scale(self) -> float:
        """Return the factor for the learning rates of parameter groups."""
        rate = self.configs.learning_rate_per_process
        is_usual = self.learning_rate == rate * self.num_processes
        return self.num_processes if is_usual else self.learning_rate / rate

    def _say(self, text: str, *values: Any) -> None:
        if self.verbose and self.rank == 0:
            logger.info(text, *values)
