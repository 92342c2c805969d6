"""Entries to a trial: `init`, `launch` in several processes, and loading from a checkpoint."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from paceline import core
from paceline._base.arguments_and_errors import check_count, count, ranks_to_check
from paceline._training.engine.checkpoints.capture_and_restore import load_models
from paceline._training.engine.checkpoints.state_format import read_training, read_weights
from paceline._training.engine.devices import join_ranks
from paceline._training.engine.gradient_reduction import DataParallel
from paceline._training.engine.horovod_reduction import join_horovod
from paceline._training.engine.model_preparation import is_on_meta, materialize
from paceline._training.engine.precision import Precision
from paceline._training.workers.processes.rank_environment import launcher_shards
from paceline._training.workers.run import call_in_workers
from paceline.core._launcher_place import launched_place
from paceline.data._order_and_random_generators import seed_everything
from paceline.data._torch_loaders import release_device_memory
from paceline.pytorch._fit_arguments import precision_of
from paceline.pytorch._trainer import Preempted
from paceline.pytorch._training_state import models_in
from paceline.pytorch._trial_and_context import PyTorchTrial, PyTorchTrialContext
from paceline.storage._storage_from_url import directory_of_checkpoint

logger = logging.getLogger(__name__)


@contextmanager
def init(
    hparams: Mapping[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    checkpoint_storage: Any = None,
    precision: str | None = None,
    data_parallel: str | None = None,
    shard_size: int | None = None,
    tensor_parallel_size: int = 1,
    num_shards: int | None = None,
    device: torch.device | str | None = None,
    check_ranks: bool | str | Sequence[str] = True,
    tensorboard_mode: core.TensorboardMode = core.TensorboardMode.OFF,
    trackers: Sequence[core.Tracker | str] = (),
) -> Iterator[PyTorchTrialContext]:
    """Begin an attempt and yield the context for making a trial.

    With several ranks (`launch`, Paceline's launcher, torchrun) the process group is made here if
    it is not there yet: NCCL if each rank has a GPU, else gloo. All generators are seeded.

    Args:
        hparams: The hyperparameters, with `global_batch_size` if the trial reads a batch size; the
            experiment's on a cluster.
        distributed: The place among several ranks; found from the environment by default.
        seed: The seed; the trial's on a cluster, else drawn and recorded for all attempts of the
            run.
        name: The run's name, see `core.init`.
        resume: The run to resume, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
        precision: The precision of the forward pass: "fp32" (the default), "bf16" or "fp16", the
            last two under torch's autocast, fp16 with gradient scaling.
        data_parallel: How gradients are summed over the ranks: "flat", after the backward pass in
            one buffer, "overlapped", during it in buckets (each the default: the latter for
            several ranks with a GPU each, that NCCL joins), or "fsdp", where parameters, gradients
            and optimizers are divided among the ranks too (FSDP2), for models that do not fit
            otherwise; see docs/sharding.md. "horovod" is "flat" by Horovod's allreduce; see
            docs/backends.md.
        shard_size: With "fsdp", the number of ranks that hold one copy of a model together, such
            as those of a node; it must divide the number of ranks. Gradients are summed over
            all copies. By default all ranks hold one copy.
        tensor_parallel_size: The number of neighbouring ranks that divide each model by the
            tensor-parallel plan of `context.wrap_model`, and train on the same samples. It must
            divide the number of ranks. With it, `data_parallel` is "flat" or "fsdp" and says how
            the groups sum gradients; `shard_size` counts groups. One process trains whole models.
        num_shards: Into how many equal shards each global batch is cut; the number of ranks (or of
            tensor-parallel groups) at the first start by default, and afterwards what the
            checkpoint says. Fewer ranks run
            several shards each and train on the same samples in every step.
        device: Where this process trains: a GPU of its own by default, else the CPU. All ranks
            must give the same kind.
        check_ranks: Whether several ranks compare their parameters, the settings of their
            optimizers and their buffers, at the start of training and before each checkpoint, to
            stop if they have drifted apart; see docs/distributed.md. Or the names of tensors that
            each rank has for itself, such as "*.queue". Statistics of batch norm are left out
            anyway.
        tensorboard_mode: Who writes TensorBoard files, see `core.init`.
        trackers: Further displays of the run, such as MLflow, see `core.init`.

    Raises:
        ValueError: `precision` or `data_parallel` is unknown, or both do not go together; or
            `num_shards` is below 1; or `shard_size` is below 2 or given without "fsdp"; or
            `tensor_parallel_size` does not divide the number of ranks.
        TypeError: `check_ranks` is neither a bool nor names.
        ImportError: `data_parallel` is "horovod", which is not installed.
    """
    # Checked first, so that a wrong argument begins no run.
    chosen_data_parallel = None if data_parallel is None else DataParallel.of(data_parallel)
    if precision is not None:
        Precision.of(precision)
    own_device = None if device is None else torch.device(device)
    compared = ranks_to_check("check_ranks", check_ranks)

    def make_context(beginning: Beginning) -> PyTorchTrialContext:
        return PyTorchTrialContext(
            beginning.core_context,
            beginning.hparams,
            beginning.core_context.seed,
            precision=Precision.of(precision or precision_of(beginning.config) or "fp32"),
            data_parallel=chosen_data_parallel,
            shard_size=shard_size,
            tensor_parallel_size=tensor_parallel_size,
            num_shards=_num_shards(beginning.core_context, num_shards, tensor_parallel_size),
            device=own_device,
            given_seed=beginning.given_seed,
            check_ranks=compared,
        )

    # An earlier training in this process, as in a notebook, may have left memory in use.
    release_device_memory()
    if chosen_data_parallel is DataParallel.HOROVOD:
        distributed = join_horovod(distributed)
    with begin_trial(
        make_context,
        join_ranks(distributed, own_device),
        hparams=hparams,
        seed=seed,
        name=name,
        resume=resume,
        checkpoint_storage=checkpoint_storage,
        tensorboard_mode=tensorboard_mode,
        trackers=trackers,
    ) as context:
        yield context


class Beginning(NamedTuple):
    """Arguments for making a context at the start of an attempt."""

    core_context: core.Context
    hparams: Mapping[str, Any] | None
    config: Mapping[str, Any]
    given_seed: int | None


_Context = TypeVar("_Context", bound=PyTorchTrialContext)


@contextmanager
def begin_trial(
    make_context: Callable[[Beginning], _Context],
    distributed: core.DistributedContext | None,
    *,
    hparams: Mapping[str, Any] | None,
    seed: int | None,
    **options: Any,
) -> Iterator[_Context]:
    """Begin an attempt of already joined ranks, and yield the new context.

    Args:
        make_context: Makes the context.
        distributed: The place among several ranks.
        hparams: The hyperparameters, unless the experiment has others.
        seed: The seed, unless the trial has one.
        options: Other options of `core.init`.
    """
    with core.init(distributed=distributed, seed=seed, hparams=hparams, **options) as core_context:
        trial = core_context.info.trial if core_context.info is not None else None
        logger.info("The seed is %d.", core_context.seed)
        seed_everything(core_context.seed)
        context = make_context(
            Beginning(core_context, hparams, {}, seed)
            if trial is None
            else Beginning(core_context, trial.hparams, trial.config, None)
        )
        # A training that made room has stored its state, so the script ends quietly.
        with context.exit_stack, suppress(Preempted):
            yield context


def _num_shards(
    core_context: core.Context, given: int | None, tensor_parallel_size: int
) -> int | None:
    """Return the number of shards: the checkpoint's, else the given, else the launcher's."""
    if given is not None:
        check_count("num_shards", given)
    latest, stored = core_context.latest_checkpoint, None
    # Read once, as ranks must agree even if a checkpoint is deleted meanwhile.
    if latest is not None and core_context.distributed.rank == 0:
        stored = core_context.checkpoint.get_metadata(latest).get("num_shards")
    stored = core_context.distributed.broadcast(stored)
    is_changed = stored is not None and given is not None and stored != given
    if is_changed and core_context.distributed.rank == 0:
        logger.warning("The checkpoint's %d shards are used instead of %d.", stored, given)
    if stored or given:
        return stored or given
    # The launcher counts ranks.
    most = launcher_shards()
    return None if most is None else max(1, most // max(1, tensor_parallel_size))


def launch(
    main: Callable[..., Any],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    heartbeat_timeout_s: float | None = 30.0,
    collective_timeout_s: float = 1800.0,
) -> list[Any]:
    """Run a function in several worker processes and return its values, in rank order.

    `init()` in the function makes the process group. The function may be defined in the script or
    in a cell of the notebook; the objects it uses from there travel with it. Returned tensors and
    models arrive on the CPU.

    A Ctrl-C reaches all workers: within `fit` the first one stores a checkpoint and ends the
    training, a second one ends the workers. They also end when this process does.

    Args:
        main: The function.
        num_workers: The number of workers; each takes one GPU if there are any.
        args: The function's positional arguments.
        kwargs: The function's keyword arguments.
        max_restarts: How often the workers may be started again when one of them is lost or
            raises. Training then resumes from the run's last checkpoint. The same exception twice
            in a row is raised.
        heartbeat_timeout_s: How long a worker may be stopped or hold Python's lock, in seconds;
            None for ever.
        collective_timeout_s: How long workers may wait for others in a collective operation, in
            seconds. Then an error names the missing ones.

    Raises:
        TypeError: `main` cannot be called or `num_workers` is no number; as `NotSendableError`
            if the function, an argument or a value that it returned cannot be pickled.
        ValueError: `num_workers` is below 1, `max_restarts` below 0, or a timeout not above 0.
        RuntimeError: This process is one of several workers itself; as `WorkerFailedError` if a
            worker was killed or left by `sys.exit()`, also with exit code 0.
        Exception: The function's error on the rank that failed first. The whole traceback of
            that rank is its cause.
    """
    if not callable(main):
        raise TypeError(f"`main` must be a function, but got {type(main).__name__}.")
    count(1)("num_workers", num_workers)
    check_count("max_restarts", max_restarts, 0)
    place = launched_place()
    if place is not None:
        raise RuntimeError(
            "`launch` must be called in a process that works alone, but this is one of"
            f" {place.size} workers of {place.launcher}. Hint: call `main` directly here, or start"
            " the script with plain `python`."
        )
    return call_in_workers(
        main,
        num_workers,
        args,
        kwargs,
        max_restarts=max_restarts,
        heartbeat_timeout_s=heartbeat_timeout_s,
        collective_timeout_s=collective_timeout_s,
    )


class CheckpointLoadContext(PyTorchTrialContext):
    """Stand in for the context of a training while a trial is built to load a checkpoint.

    There are no devices but the CPU, no other ranks and no run. `wrap_model`, `wrap_optimizer` and
    the like only register their arguments.

    Args:
        hparams: The hyperparameters.
        data_config: The section `data` of the experiment's config.
        seed: The seed of the trial.
        num_shards: Into how many shards a global batch was cut.
    """

    def __init__(
        self,
        hparams: Mapping[str, Any] | None = None,
        *,
        data_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        num_shards: int = 1,
    ) -> None:
        cpu = torch.device("cpu")
        no_run = cast(core.Context, _NoRun())
        super().__init__(no_run, hparams, seed, num_shards=num_shards, device=cpu)
        self._data_config = dict(data_config or {})

    def wrap_model(
        self,
        model: torch.nn.Module,
        *,
        init_weights: Callable[[torch.nn.Module], Any] | None = None,
        **options: Any,
    ) -> torch.nn.Module:
        """Register a model to have its weights loaded."""
        if is_on_meta(model):
            materialize(model, self.device, init_weights, has_ranks=False)
        self.stepper.models.append(model)
        return model

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the stored part of the experiment's config: its section `data`."""
        return {"data": self._data_config}


class _NoRun:
    """Stands where a context of training has the core context."""

    def __init__(self) -> None:
        self.distributed = core.DistributedContext.single()
        self.info = None

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"`context.core.{name}` needs a run, but the trial is only loaded from a checkpoint."
            " Hint: use it in training code, not in `__init__`."
        )


def load_trial_from_checkpoint_path(
    path: str | os.PathLike[str],
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: Mapping[str, Any] | None = None,
) -> PyTorchTrial:
    """Build a trial as in training and load its models' weights, on the CPU.

    No code comes from the checkpoint: without `trial_class`, the class is imported by its name
    from `sys.path`.

    Args:
        path: The checkpoint's directory, as `checkpoint.restore_path` or `download` give it, or its
            URL, such as ``s3://bucket/prefix/UUID``.
        trial_class: The class; needed if it was defined in a script or a notebook.
        trial_kwargs: Arguments of its `__init__` besides the context.

    Returns:
        The trial; its models are in the mode in which its `__init__` left them.

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or one of other models.
        CheckpointCorruptError: A file is missing or cannot be read.
        ImportError: The class cannot be imported.
        TypeError: The class is no `PyTorchTrial`.
    """
    with directory_of_checkpoint(path) as directory:
        return _loaded_trial(directory, trial_class, trial_kwargs)


def _loaded_trial(
    directory: Path, trial_class: type[PyTorchTrial] | None, trial_kwargs: Mapping[str, Any] | None
) -> PyTorchTrial:
    training = read_training(directory)
    kind = _imported_class(training["trial"]) if trial_class is None else trial_class
    if not (isinstance(kind, type) and issubclass(kind, PyTorchTrial)):
        raise TypeError(f"The trial's class must be a PyTorchTrial, but got {kind!r}.")
    if training["unstored_hparams"]:
        logger.warning(
            "The checkpoint holds no values of the hyperparameters %s, which are no plain data.",
            ", ".join(training["unstored_hparams"]),
        )
    context = CheckpointLoadContext(
        training["hparams"],
        data_config=training["data_config"],
        seed=training["seed"],
        num_shards=training["num_shards"],
    )
    trial = kind(context, **(trial_kwargs or {}))
    parts = {"training": training}
    for index in range(training["num_models"]):
        parts[f"model_{index}"] = read_weights(directory, training, index)
    load_models(context.models, models_in(parts), training.get("bases", ()))
    return trial


def load_weights_from_checkpoint_path(
    path: str | os.PathLike[str], model: int = 0
) -> dict[str, torch.Tensor]:
    """Return a model's weights for `load_state_dict`; tied weights under all their names.

    Of a model that was wrapped with `trainable_only`, they are the trained weights, and the
    buffers: `load_state_dict(weights, strict=False)` adds them to the base.

    Args:
        path: The checkpoint's directory or its URL.
        model: The number of the model in the order in which the trial wrapped them.

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or no such model.
        CheckpointCorruptError: A file is missing or cannot be read.
        CheckpointNotFoundError: The checkpoint was deleted meanwhile.
    """
    with directory_of_checkpoint(path) as directory:
        return read_weights(directory, read_training(directory), model)


def _imported_class(facts: Mapping[str, Any]) -> Any:
    module_name, _, qualname = facts["class"].partition(":")
    if module_name == "__main__" or "<locals>" in qualname:
        place = "a function" if "<locals>" in qualname else facts["source"]
        name = qualname.rpartition(".")[2]
        raise ImportError(
            f"A trial's class can be imported only from a module, but {name} was defined in"
            f" {place}. Hint: load_trial_from_checkpoint_path(path, trial_class={name})."
        )
    try:
        found: Any = import_module(module_name)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not _is_part_of(module_name, error.name):
            # The module is there, but one that it imports is missing.
            raise
        raise ImportError(
            f"The trial's class {facts['class']!r} must be importable, but is not: {error}. Hint:"
            " put the directory of its module on PYTHONPATH, or pass `trial_class`."
        ) from error
    return found


def _is_part_of(module_name: str, missing: str | None) -> bool:
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")
