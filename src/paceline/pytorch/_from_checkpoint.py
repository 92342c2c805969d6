"""Trials and weights from a checkpoint, outside training."""

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from paceline import core
from paceline._training.engine.checkpoints.models_and_optimizers import load_models
from paceline._training.engine.checkpoints.state_files import read_training, read_weights
from paceline._training.engine.model_preparation import is_on_meta, materialize
from paceline.pytorch._training_state import models_in
from paceline.pytorch._trial_and_context import PyTorchTrial, PyTorchTrialContext
from paceline.storage._storage_by_url import directory_of_checkpoint

logger = logging.getLogger(__name__)


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
    directory: Path,
    trial_class: type[PyTorchTrial] | None,
    trial_kwargs: Mapping[str, Any] | None,
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
