"""Functions for preparing data, models and optimizers in a train function."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline._training.workers.processes.rank_environment import RankInfo
from paceline.core._exceptions import NotOfferedError
from paceline.train._run_protocol import current_session

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from paceline._training.engine.fsdp_and_tensor_parallel import ShardUnits
    from paceline._training.engine.gradient_reduction import DataParallel
    from paceline.core._media import MediaReports
    from paceline.train._prepared_loader_and_steps import PreparedLoader
    from paceline.train._rank_checkpoints import Files
    from paceline.train._rank_session import LooseSession


logger = logging.getLogger(__name__)

_ALONE = RankInfo()
T = TypeVar("T")


# ---- where this is ---------------------------------------------------------------------------


def in_worker() -> bool:
    """Tell whether this is called in a worker of a `Trainer`."""
    return current_session() is not None


def world_rank() -> int:
    """Return this worker's number among all, from 0; 0 outside of a run."""
    return _rank_info().rank


def local_rank() -> int:
    """Return this worker's number on its node, from 0; 0 outside of a run."""
    return _rank_info().local_rank


def node_rank() -> int:
    """Return the number of this worker's node, from 0; 0 outside of a run."""
    return _rank_info().node_rank


def cross_rank() -> int:
    """Return the number of this worker's node, like `node_rank`; the name used by Horovod."""
    return _rank_info().node_rank


def world_size() -> int:
    """Return the number of workers; 1 outside of a run."""
    return _rank_info().world_size


def get_device() -> "torch.device":
    """Return the device of this worker: its GPU, else the CPU."""
    return call_session().device


def _rank_info() -> RankInfo:
    session = current_session()
    return _ALONE if session is None else session.rank_info


# ---- reports and checkpoints -----------------------------------------------------------------


def report(metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Report metrics of this worker; outside of a run they are logged.

    A report goes to a file on this machine and waits for nobody: ranks may report as often as they
    like, and from any thread. The driver's callbacks get it within 50 ms; with 0 workers they get
    reports of other threads with the next one of the function's own thread, or at its end.

    Args:
        metrics: Names to numbers, strings, booleans, lists, nested dictionaries, NumPy scalars or
            0-d tensors.
        more: The same by keywords.

    Raises:
        TypeError: A value has another type; the message names it.
        ValueError: A name is empty, or an integer needs more than 64 bits.
    """
    if "checkpoint" in more and not isinstance(more["checkpoint"], (int, float, str)):
        raise TypeError(
            "`report` takes metrics alone, but got `checkpoint`"
            f" ({type(more['checkpoint']).__name__}). Hint: `train.save_checkpoint(state)` stores a"
            " checkpoint, and `train.save_checkpoint(files=path)` a directory."
        )
    session = current_session()
    if session is not None:
        session.report(more if metrics is None else {**metrics, **more})
    else:
        logger.info("Reported outside of a run: %s", {**(metrics or {}), **more})


def media() -> "MediaReports":
    """Return the reports of images, sound, tables and other media of this worker.

    Call it after `load_checkpoint()`, as reports begin at the step that it resumes from.

    Raises:
        RuntimeError: The function is not within a run.
        NotOfferedError: This node does not see the run directory.
    """
    session = current_session()
    if session is None:
        raise RuntimeError("`train.media()` must be called within a run, but there is none.")
    found: MediaReports = session.media
    return found


def save_checkpoint(
    state: Any = None,
    *,
    files: "Files" = None,
    shard: bool = False,
    allow_pickle: bool = False,
    **more: Any,
) -> None:
    """Save a state to resume from; every rank must call equally often.

    The chief's state is stored; the other ranks add their own part: their random numbers and
    their place in the data. The n-th checkpoint exists as soon as all ranks have made their n-th
    call, and none waits for another: only copying the state takes the function's time. Within an
    iteration over a prepared loader, the batch that was given out last counts as done.

    Each rank stores its pieces of a model that is divided among the ranks. All ranks must then pass
    the state.

    Args:
        state: Tensors, numbers, strings, booleans, None, NumPy arrays, and lists, tuples and
            dictionaries of these. Whatever has a `state_dict()`, such as modules, optimizers and
            schedulers, is stored by that.
        files: Paths of files and directories to store a copy of. True asks for nothing more, as
            every checkpoint consists of files.
        shard: Not offered yet.
        allow_pickle: Whether to pickle values that the safe format does not know.
        more: The state by keywords.

    Raises:
        TypeError: The state holds something else; the message names its key.
        ValueError: The checkpoint strategy's value is missing or no number.
        FileNotFoundError: A path of `files` does not exist.
        CheckpointWriteError: The three checkpoints before could not be written.
    """
    if shard:
        raise NotOfferedError("`save_checkpoint(shard=True)` is not offered yet.")
    if state is not None and more:
        raise TypeError(
            "`save_checkpoint` takes a state or keywords, but got both: keywords"
            f" {sorted(more)}. Hint: put them into the state."
        )
    # Other ranks may give nothing: they add their random numbers and place in the data.
    if state is None and not more and world_rank() == 0:
        raise TypeError(
            "`save_checkpoint` must be given what to save, but got nothing. Hint:"
            " save_checkpoint(model=model, optimizer=optimizer, epoch=epoch)."
        )
    session = current_session()
    if session is not None:
        session.save(more or state, files=files, allow_pickle=allow_pickle)
    else:
        logger.info("Outside of a run no checkpoint is stored.")


def load_checkpoint(*, files_to: str | os.PathLike[str] | None = None) -> Any:
    """Return the state to resume from, or None at a fresh start and outside of a run.

    Objects with a `state_dict()` come back as such dictionaries; tensors are on the CPU. The random
    numbers and the place in the data are put back when a prepared loader is next iterated over, or
    by `restore_random_state()`: numbers drawn before that do not count.

    Args:
        files_to: A directory to copy the checkpoint's files to.

    Raises:
        CheckpointCorruptError: Files of the checkpoint are missing or altered.
    """
    session = current_session()
    if session is None:
        return None
    return session.load(None if files_to is None else Path(files_to))


def restore_random_state() -> None:
    """Restore the random generators of the loaded checkpoint.

    It is for functions that do not iterate over a prepared loader; after such an iteration has
    begun, and without a loaded checkpoint, it does nothing.
    """
    session = current_session()
    if session is not None:
        session.restore_random_state()


def should_preempt() -> bool:
    """Tell whether the run is to make room: save a checkpoint then, and return.

    That is so after SIGTERM or SIGUSR1 to the script, or to any rank's script if a launcher has
    started it, after SIGUSR1 to a worker, and when a master wants it. It is also so when Ray drains
    a node of the workers: the function is then called again in workers on other nodes. All ranks
    call it equally often, such as after each step, and get the same answer at the same call, about
    a second late at most. Outside of a run it is False.
    """
    session = current_session()
    return session is not None and session.should_preempt()


def call_session(*, begins: bool = False) -> "LooseSession":
    """Return this process's run session, or a stand-in outside of a run."""
    session: LooseSession | None = current_session()
    if session is not None:
        return session
    # Imported late, as it loads torch.
    from paceline.train._rank_session import loose_session

    return loose_session(begins=begins)


def prepare_data_loader(loader: Any, *, move_to_device: bool = True) -> "PreparedLoader":
    """Return a clone of a data loader yielding this worker's part, on its device.

    The loader's batch size is for one worker. Every option is kept; with `shuffle=True` each
    epoch has an order of its own that depends on the run's seed alone.

    Args:
        loader: A torch `DataLoader`. An iterable data set must be the same on all ranks.
        move_to_device: Whether batches are moved to this worker's device.

    Raises:
        TypeError: `loader` is no torch `DataLoader`.
        ValueError: It has no samples, or fewer than there are workers.
    """
    return call_session().prepare_loader(loader, is_moved=move_to_device)


def prepare_model(
    model: "torch.nn.Module",
    *,
    move_to_device: bool = True,
    data_parallel: "str | DataParallel" = "flat",
    shard_units: "ShardUnits" = None,
    shard_precision: "MixedPrecisionPolicy | None" = None,
    shard_size: int | None = None,
) -> "torch.nn.Module":
    """Return a model on this worker's device, equal on all ranks and trained jointly.

    After each backward pass its gradients are averaged over the samples of all ranks, so that
    clipping and the optimizer's step need no change. A model that is wrapped in
    `DistributedDataParallel` already is left to that.

    Args:
        model: The model.
        move_to_device: Whether it is moved to this worker's device.
        data_parallel: How gradients are summed over the ranks: "flat", in one buffer after the
            backward pass; "overlapped", in buckets during it; "fsdp" divides the model among the
            ranks as well. Make the optimizer of the returned model.
        shard_units: With "fsdp", which modules are gathered as a whole: a class or a tuple of
            them, a least number of parameters, or a function of a module. By default the members
            of the outermost sequences.
        shard_precision: With "fsdp", the types in which parameters are gathered and gradients are
            summed, as torch's `MixedPrecisionPolicy`.
        shard_size: With "fsdp", the number of ranks that hold one copy of the model together, which
            must divide the number of ranks. By default all of them.

    Returns:
        The same object, or with "overlapped" a wrapper.

    Raises:
        TypeError: The model is no module, or an option is of another type.
        ValueError: `data_parallel` is unknown, or an option is given without "fsdp" or does not
            suit the model.
        NotOfferedError: The model has DTensors, or is on the meta device.
    """
    from paceline._training.engine.gradient_reduction import DataParallel
    from paceline.train._prepared_models import prepare_model

    return prepare_model(
        call_session(begins=True),
        model,
        is_moved=move_to_device,
        data_parallel=DataParallel.of(data_parallel),
        shard_units=shard_units,
        shard_precision=shard_precision,
        shard_size=shard_size,
    )


def prepare_optimizer(optimizer: Any) -> Any:
    """Return an optimizer with gradients averaged over all samples, and losses scaled if needed.

    It is the same object. Parameters that belong to no prepared model are averaged from now on as
    well; within an accumulated step, `step` and `zero_grad` wait for its last batch.

    Raises:
        TypeError: It is no torch optimizer.
        ValueError: A model is divided among the ranks, and the optimizer was made before.
    """
    from paceline.train._prepared_models import prepare_optimizer

    return prepare_optimizer(call_session(), optimizer)


def backward(loss: "torch.Tensor", **options: Any) -> None:
    """Run the backward pass of a loss, scaled if the precision needs a scaler.

    Args:
        loss: The mean loss of a batch, a 0-d tensor.
        options: The options of `torch.Tensor.backward`.
    """
    call_session().steps.backward(loss, options)


def verify_steps(
    compute: Callable[..., T], *, every: int = 100, on_mismatch: str = "stop"
) -> Callable[..., T]:
    """Return a function of forward and backward pass that is computed twice now and then.

    The first call, and each one with a multiple of `every`, computes twice from the same state, and
    compares gradients, buffers and random states of each rank bit by bit. All ranks call it
    equally often; the optimizer steps after it. See docs/exactness.md.

    Args:
        compute: Runs forward and backward pass of a batch, and returns the loss.
        every: The calls from one that computes twice to the next.
        on_mismatch: Whether to "stop" at a difference, or to "warn".

    Raises:
        TypeError: `compute` is no function.
        ValueError: `every` is below 1, or `on_mismatch` unknown.
    """
    from paceline.train._prepared_models import verify_steps

    return verify_steps(call_session(), compute, every, on_mismatch)


def accelerate(
    model: Any,
    loss: Any = None,
    optimizer: Any = None,
    *,
    mixed_precision: bool | str | None = None,
    precision: str | None = None,
    strategy: str = "auto",
    data_parallel: "str | DataParallel | None" = None,
    shard_units: "ShardUnits" = None,
    shard_precision: "MixedPrecisionPolicy | None" = None,
    shard_size: int | None = None,
    compile: bool | Mapping[str, Any] = False,
    gradient_checkpointing: bool = False,
    gradient_accumulation: int = 1,
) -> Any:
    """Prepare a model, and the optimizer if given, with options for faster training.

    Parameters and optimizers keep their number format. With "fp16" losses must go through
    `train.backward(loss)`, as they are scaled.

    Args:
        model: The model; the first three arguments are distinguished by their types.
        loss: The loss function; a module is moved to the device.
        optimizer: The optimizer of the model.
        mixed_precision: Whether the forward pass computes in 16 bits: True for what suits the
            device, or "bf16" or "fp16".
        precision: The same by one name: "fp32", "bf16" or "fp16".
        strategy: The same as `data_parallel`, where "ddp" is "overlapped". "auto" is "flat".
        data_parallel: How gradients are summed: "flat", in one buffer after the backward pass;
            "overlapped", in buckets during it, which suits GPUs; "fsdp" divides the model among
            the ranks as well.
        shard_units: With "fsdp", which modules are gathered as a whole, see `prepare_model`, as for
            `shard_precision` and `shard_size`.
        compile: Whether the model is compiled, or the options of `torch.compile`.
        gradient_checkpointing: Whether blocks are computed again in the backward pass instead of
            kept in memory: by the model's own method if it has one, else for the members of its
            outermost sequences.
        gradient_accumulation: The batches of a step of the optimizer, which must be given or
            prepared. An epoch's last step may have fewer.

    Returns:
        The model to call, or model and optimizer if that is given.

    Raises:
        TypeError: An argument is no model, loss or optimizer.
        ValueError: A value is unknown, or values contradict each other.
    """
    from paceline.train._prepared_models import accelerate

    return accelerate(
        call_session(begins=True),
        (model, loss, optimizer),
        mixed_precision=mixed_precision,
        precision=precision,
        strategy=strategy,
        data_parallel=data_parallel,
        shard_options={
            "shard_units": shard_units,
            "shard_precision": shard_precision,
            "shard_size": shard_size,
        },
        compile_options=compile,
        is_checkpointing=gradient_checkpointing,
        num_accumulated=gradient_accumulation,
    )


def full_state_dict(source: Any) -> Any:
    """Return the state of a model or an optimizer with whole tensors, on the CPU.

    All ranks call it together. It needs memory for the whole state on each rank.

    Args:
        source: A model, an optimizer, or anything else with a `state_dict()`; or a nested state.
    """
    from paceline.train._prepared_models import full_state_dict

    return full_state_dict(source)


def enable_reproducibility(seed: int = 0) -> None:
    """Seed all generators and the order of data, and choose deterministic operations.

    Ranks draw different numbers. Call it first in the train function.

    Args:
        seed: The seed.
    """
    from paceline.train._prepared_models import enable_reproducibility

    enable_reproducibility(call_session(), seed)


def get_dataset(name: str | int | None = None) -> Any:
    """Return the data set given to `Trainer.run`.

    Args:
        name: Which one, if it was given several: the key of a dictionary, or the number.

    Raises:
        RuntimeError: It was given none, or this is outside of a run.
        KeyError: There is none of this name.
        ValueError: It was given several, and there is no name.
    """
    from paceline.train._worker_datasets import dataset_of

    return dataset_of(current_session(), name)


def get_datasets() -> Any:
    """Return all data sets given to `Trainer.run`.

    Returns:
        A list of a sequence's data sets, a dictionary of a dictionary's. The folds of a cross
        validation are pairs: the training data and the validation data.

    Raises:
        RuntimeError: It was given none, or this is outside of a run.
    """
    from paceline.train._worker_datasets import datasets_of

    return datasets_of(current_session())


def get_dataset_shard(name: str | int | None = None) -> Any:
    """Return this worker's part of the data set returned by `get_dataset`."""
    return get_dataset(name).get_shard()
