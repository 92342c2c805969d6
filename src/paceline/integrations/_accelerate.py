"""Hugging Face's Accelerate in a train function."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline import train
from paceline._base.imports import required_library

required_library("accelerate", "save_accelerator", "accelerate")

from accelerate.tracking import GeneralTracker  # type: ignore[import-untyped]  # noqa: E402
from accelerate.utils import DistributedType  # type: ignore[import-untyped]  # noqa: E402

_FOLDER = "accelerate"
# Types with sharded state: all ranks write pieces into one directory.
_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def save_accelerator(accelerator: Any, **state: Any) -> None:
    """Save the state of `accelerator.save_state` as a checkpoint of the run; all ranks call this.

    Args:
        accelerator: The `Accelerator`.
        state: More to save, such as the epoch and the step; see `train.save_checkpoint`.

    Raises:
        ImportError: Accelerate is not installed.
        ValueError: The accelerator divides models among the ranks.
    """
    _check(accelerator)
    with TemporaryDirectory(prefix="paceline-accelerate-") as directory:
        folder = Path(directory) / _FOLDER
        accelerator.save_state(str(folder))
        if train.world_rank() == 0:
            train.save_checkpoint({_FOLDER: state}, files=[folder])
        else:
            # The chief's state serves all; this adds the rank's random numbers and place in the
            # data.
            train.save_checkpoint()


def load_accelerator(accelerator: Any) -> dict[str, Any] | None:
    """Restore the state saved by `save_accelerator` if the run resumes from its checkpoint.

    Call it after `accelerator.prepare`, right before training resumes: random numbers are put back
    too.

    Args:
        accelerator: The `Accelerator`.

    Returns:
        The further saved state; None at a fresh start.

    Raises:
        ImportError: Accelerate is not installed.
        ValueError: The accelerator divides models among the ranks, or the checkpoint was saved by
            something else.
    """
    _check(accelerator)
    with TemporaryDirectory(prefix="paceline-accelerate-") as directory:
        state = train.load_checkpoint(files_to=directory)
        if state is None:
            return None
        if not isinstance(state, dict) or _FOLDER not in state:
            raise ValueError(
                "`load_accelerator` must find a checkpoint of `save_accelerator`, but this one was"
                " saved by something else. Hint: train.load_checkpoint() returns it."
            )
        accelerator.load_state(str(Path(directory) / _FOLDER))
    train.restore_random_state()
    own: dict[str, Any] = state[_FOLDER]
    return own


class AccelerateReports(GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    """Tracker reporting `accelerator.log`; use `Accelerator(log_with=AccelerateReports())`.

    As with each tracker, `accelerator.init_trackers(name)` must be called before.
    """

    name = "paceline"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        """Return None: there is no tracker object behind this class."""
        return

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: the run has its config."""

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Report values."""
        train.report(values if step is None else {**values, "step": step})


def _check(accelerator: Any) -> None:
    if accelerator.distributed_type in _SHARDED:
        raise ValueError(
            "`accelerator` must keep the whole model on each rank, but divides it by"
            f" {accelerator.distributed_type}. Hint: train.prepare_model(model,"
            ' data_parallel="fsdp").'
        )
