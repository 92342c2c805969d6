"""The entry to training a trial."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from paceline import core
from paceline.engine import (
    DataParallel,
    Precision,
    join_ranks,
    release_device_memory,
    seed_everything,
)
from paceline.pytorch._config import precision_of
from paceline.pytorch._context import PyTorchTrialContext
from paceline.pytorch._trainer import Preempted
from paceline.workers import shards_of_launcher

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
    data_parallel: str = "flat",
    shard_size: int | None = None,
    num_shards: int | None = None,
    device: torch.device | str | None = None,
    tensorboard_mode: core.TensorboardMode = core.TensorboardMode.OFF,
) -> Iterator[PyTorchTrialContext]:
    """Begin an attempt and yield the context that a trial is made with.

    With several ranks (`launch`, Paceline's launcher, torchrun) the process group is made here if
    it is not there yet: NCCL if each rank has a GPU, else gloo. All generators are seeded.

    Args:
        hparams: The hyperparameters, with `global_batch_size`; the experiment's on a cluster.
        distributed: The place among several ranks; found from the environment by default.
        seed: The seed; the trial's on a cluster, else drawn and recorded for all attempts of the
            run.
        name: The run's name, see `core.init`.
        resume: The run to go on with, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
        precision: What the forward pass computes in: "fp32" (the default), "bf16" or "fp16", the
            last two under torch's autocast, fp16 with gradient scaling.
        data_parallel: How gradients are summed over the ranks: "flat", after the backward pass in
            one buffer, "overlapped", during it in buckets, or "fsdp", where parameters, gradients
            and optimizers are divided among the ranks too (FSDP2), for models that do not fit
            otherwise; see docs/sharding.md.
        shard_size: With "fsdp", the number of ranks that hold one copy of a model together, such
            as those of a node; it must divide the number of ranks. Gradients are summed over
            all copies. By default all ranks hold one copy.
        num_shards: Into how many equal shards each global batch is cut; the number of ranks at the
            first start by default, and afterwards what the checkpoint says. Fewer ranks run
            several shards each and train on the same samples in every step.
        device: Where this process trains: a GPU of its own by default, else the CPU. All ranks
            must give the same kind.
        tensorboard_mode: Who writes TensorBoard files, see `core.init`.

    Raises:
        ValueError: `precision` or `data_parallel` is unknown, or both do not go together; or
            `num_shards` is below 1; or `shard_size` is below 2 or given without "fsdp".
    """
    chosen_data_parallel = DataParallel.of(data_parallel)
    if precision is not None:
        Precision.of(precision)
    own_device = None if device is None else torch.device(device)
    release_device_memory()
    distributed = join_ranks(distributed, own_device)
    with core.init(
        distributed=distributed,
        name=name,
        resume=resume,
        checkpoint_storage=checkpoint_storage,
        tensorboard_mode=tensorboard_mode,
        seed=seed,
        hparams=hparams,
    ) as core_context:
        trial = core_context.info.trial if core_context.info is not None else None
        if trial is not None:
            hparams = trial.hparams
        given_seed = seed if trial is None else None
        seed = core_context.seed
        logger.info("The seed is %d.", seed)
        seed_everything(seed)
        config = {} if trial is None else trial.config
        context = PyTorchTrialContext(
            core_context,
            hparams,
            seed,
            precision=Precision.of(precision or precision_of(config) or "fp32"),
            data_parallel=chosen_data_parallel,
            shard_size=shard_size,
            num_shards=_num_shards(core_context, num_shards),
            device=own_device,
            given_seed=given_seed,
        )
        with context.exit_stack, suppress(Preempted):
            yield context


def _num_shards(core_context: core.Context, given: int | None) -> int | None:
    """Return what the checkpoint to go on from was cut into, else what was asked for."""
    if given is not None and (not isinstance(given, int) or given < 1):
        raise ValueError(f"`num_shards` must be an integer of at least 1, but got {given!r}.")
    latest, stored = core_context.latest_checkpoint, None
    if latest is not None and core_context.distributed.rank == 0:
        stored = core_context.checkpoint.get_metadata(latest).get("num_shards")
    stored = core_context.distributed.broadcast(stored)
    if stored is not None and given is not None and stored != given:
        logger.warning("The checkpoint's %d shards are used instead of %d.", stored, given)
    return stored or given or shards_of_launcher()
