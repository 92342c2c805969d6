"""Functions for use in a train function. Importing this loads no torch."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core import NotOfferedError
from paceline.workers import RankInfo
from paceline.workers.runs import current_session

if TYPE_CHECKING:
    import torch

    from paceline.engine import Files, LooseSession

logger = logging.getLogger(__name__)

_ALONE = RankInfo()


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
    """Return the number of this worker's node, by the name that Horovod has for it."""
    return _rank_info().node_rank


def world_size() -> int:
    """Return the number of workers; 1 outside of a run."""
    return _rank_info().world_size


def get_device() -> "torch.device":
    """Return the device of this worker: its GPU, else the CPU."""
    return session_of_call().device


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


def save_checkpoint(
    state: Any = None,
    *,
    files: "Files" = None,
    shard: bool = False,
    allow_pickle: bool = False,
    **more: Any,
) -> None:
    """Save a state to go on from; every rank calls it equally often.

    The chief's state is stored; the other ranks add what they alone know: their random numbers and
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
        allow_pickle: Whether to pickle what the safe format does not know.
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
    """Return the state that this run goes on from, or None at a fresh start and outside of a run.

    What had a `state_dict()` comes back as that; tensors are on the CPU. The random numbers and
    the place in the data are put back when a prepared loader is next iterated over, or by
    `restore_random_state()`: what is drawn before that does not count.

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
    """Put back the random numbers of the checkpoint that was loaded.

    It is for functions that do not iterate over a prepared loader; after such an iteration has
    begun, and without a loaded checkpoint, it does nothing.
    """
    session = current_session()
    if session is not None:
        session.restore_random_state()


def should_preempt() -> bool:
    """Tell whether the run is to make room: save a checkpoint then, and return.

    That is so after SIGTERM or SIGUSR1 to the script, to that of any rank if a launcher has started
    it, after SIGUSR1 to a worker, and when a master wants it. It is also so when Ray drains a node
    of the workers: the function is then called again in workers on other nodes. All ranks call it
    equally often, such as after each step, and get the same answer at the same call, about a second
    late at most. Outside of a run it is False.
    """
    session = current_session()
    return session is not None and session.should_preempt()


def session_of_call(*, begins: bool = False) -> "LooseSession":
    """Return the run that this process works for, or what stands for one outside of it."""
    session: LooseSession | None = current_session()
    if session is not None:
        return session
    from paceline.engine import loose_session

    return loose_session(begins=begins)
