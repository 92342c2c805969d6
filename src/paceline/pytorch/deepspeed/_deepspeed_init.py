"""The entry to training a trial by DeepSpeed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline import core
from paceline.engine import (
    import_deepspeed,
    join_deepspeed,
    join_ranks,
    release_device_memory,
)
from paceline.pytorch._trial_init import Beginning, begin_trial
from paceline.pytorch.deepspeed._deepspeed_context import DeepSpeedTrialContext


@contextmanager
def init(
    hparams: Mapping[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    checkpoint_storage: Any = None,
    tensorboard_mode: core.TensorboardMode = core.TensorboardMode.OFF,
    device: torch.device | str | None = None,
    trackers: Sequence[core.Tracker | str] = (),
) -> Iterator[DeepSpeedTrialContext]:
    """Begin an attempt and yield the context that a `DeepSpeedTrial` is made with.

    With several ranks (`python -m paceline.launch.deepspeed`, DeepSpeed's own launcher, torchrun)
    the process group is made here if it is not there yet, and DeepSpeed is told of it. A process
    that works alone gets a group of one, which stays until the process ends.

    Args:
        hparams: The hyperparameters; the experiment's on a cluster.
        distributed: The place among several ranks; found from the environment by default.
        seed: The seed, see `pytorch.init`.
        name: The run's name, see `core.init`.
        resume: The run to go on with, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
        tensorboard_mode: Who writes TensorBoard files, see `core.init`.
        device: Where this process trains: a GPU of its own by default, else the CPU.
        trackers: What else shows the run, see `core.init`.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    deepspeed = import_deepspeed()
    own_device = None if device is None else torch.device(device)
    release_device_memory()
    distributed = join_ranks(distributed, own_device)
    join_deepspeed(deepspeed, distributed, own_device)

    def make_context(beginning: Beginning) -> DeepSpeedTrialContext:
        return DeepSpeedTrialContext(
            beginning.core_context,
            beginning.hparams,
            beginning.core_context.seed,
            device=own_device,
            given_seed=beginning.given_seed,
        )

    with begin_trial(
        make_context,
        distributed,
        hparams=hparams,
        seed=seed,
        name=name,
        resume=resume,
        checkpoint_storage=checkpoint_storage,
        tensorboard_mode=tensorboard_mode,
        trackers=trackers,
    ) as context:
        yield context
