"""Hugging Face's Accelerate, in train functions and in plain scripts."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline import core, train
from paceline._base.imports import required_library
from paceline.integrations._library_reports import LibraryRun, split_by_names

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


class PacelineTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    """Tracker reporting `accelerator.log`; use `Accelerator(log_with=PacelineTracker())`.

    As with each tracker, `accelerator.init_trackers(name)` must be called before. In a
    train function all ranks report to that run. Elsewhere the main process begins a run
    of `core.init`, which `accelerator.end_training()` ends; metrics with names that begin with
    `eval`, `test` or `val` are of validation there.

    Args:
        context: A context of `core.init` to report to; you close it.
        options: Arguments of `core.init` for a run of its own, such as `name`.
    """

    name = "paceline"
    requires_logging_directory = False

    def __init__(self, context: core.Context | None = None, **options: Any) -> None:
        super().__init__()
        self.main_process_only = not train.in_worker()
        self._run = LibraryRun(context, options, is_chief_alone=True)

    @property
    def tracker(self) -> core.Context | None:
        """The context of the run; None in a train function."""
        return self._run.context

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Begin the run with hyperparameters; a train function's run has its config."""
        self._run.set_hparams(values)
        self._run.begin()

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Report values; without a step, one after the last one."""
        if train.in_worker():
            train.report(values if step is None else {**values, "step": step})
            return
        trained, evaluated = split_by_names(values)
        self._run.report(trained, evaluated, step=self._run.step + 1 if step is None else step)

    def finish(self) -> None:
        """End the run."""
        self._run.close()


def _check(accelerator: Any) -> None:
    if accelerator.distributed_type in _SHARDED:
        raise ValueError(
            "`accelerator` must keep the whole model on each rank, but divides it by"
            f" {accelerator.distributed_type}. Hint: train.prepare_model(model,"
            ' data_parallel="fsdp").'
        )
