"""The entry to training a trial."""

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import core
from paceline.engine import seed_everything
from paceline.pytorch._context import PyTorchTrialContext

logger = logging.getLogger(__name__)

_MAX_SEED = 2**31


@contextmanager
def init(
    hparams: Mapping[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    checkpoint_storage: Any = None,
) -> Iterator[PyTorchTrialContext]:
    """Begin an attempt and yield the context that a trial is made with.

    With several ranks (torchrun, Paceline's launcher) the process group is made here if it is not
    there yet: NCCL with GPUs, else gloo. All generators are seeded.

    Args:
        hparams: The hyperparameters, with `global_batch_size`; the experiment's on a cluster.
        distributed: The place among several ranks; found from the environment by default.
        seed: The seed; the trial's on a cluster, else drawn and recorded.
        name: The run's name, see `core.init`.
        resume: The run to go on with, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
    """
    distributed = _join(distributed)
    with core.init(
        distributed=distributed, name=name, resume=resume, checkpoint_storage=checkpoint_storage
    ) as core_context:
        trial = core_context.info.trial if core_context.info is not None else None
        if trial is not None:
            hparams, seed = trial.hparams, trial.trial_seed
        elif seed is None:
            seed = core_context.distributed.broadcast(secrets.randbelow(_MAX_SEED))
            logger.info("The seed is %d.", seed)
        assert seed is not None
        seed_everything(seed)
        yield PyTorchTrialContext(core_context, hparams, seed)


def _join(distributed: core.DistributedContext | None) -> core.DistributedContext | None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    if distributed is None and size > 1:
        return core.DistributedContext.from_torch_distributed()
    return distributed
