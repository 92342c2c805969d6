"""The trainer of Hugging Face's Transformers in a train function."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from paceline import train
from paceline._base.imports import required_library
from paceline.integrations._library_reports import library_report

required_library("transformers", "prepare_transformers", "transformers")

import transformers  # noqa: E402  # after the check that it is there

_KEY = "transformers"
_EVALUATED = "eval_"


def prepare_transformers(trainer: Any) -> Any:
    """Have a trainer of Transformers report, save checkpoints of the run, and resume from the last.

    Its logs are reported, and its saved states become checkpoints of the run, as its `args` say.
    A search judges its evaluations, which have names with `eval_`; all that it logs if `args` has
    no `eval_strategy`.
    `train()` without `resume_from_checkpoint` resumes from the run's checkpoint. When the run is
    to make room, a checkpoint is saved after the present step, and training ends. Of the trainer's
    own directories only the newest is kept, unless `save_total_limit` says otherwise.

    Args:
        trainer: A `transformers.Trainer`.

    Returns:
        The same trainer.

    Raises:
        ImportError: Transformers is not installed.
        TypeError: It is no trainer of Transformers.
    """
    if not isinstance(trainer, transformers.Trainer):
        kind = type(trainer)
        raise TypeError(
            "`trainer` must be a transformers.Trainer, but is a"
            f" {kind.__module__}.{kind.__qualname__}."
        )
    if trainer.args.save_total_limit is None:
        trainer.args.save_total_limit = 1
    files = TemporaryDirectory(prefix="paceline-transformers-")
    state = train.load_checkpoint(files_to=files.name)
    # The files stay as long as the trainer has the callback.
    trainer.add_callback(_TransformersCallback(files))
    if isinstance(state, Mapping) and _KEY in state:
        _go_on_from(trainer, str(Path(files.name) / state[_KEY]))
    return trainer


def _go_on_from(trainer: Any, place: str) -> None:
    """Make `train` start from a checkpoint, unless given another checkpoint."""
    own = trainer.train

    def train_on(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        resume = place if resume_from_checkpoint is None else resume_from_checkpoint
        return own(resume, *args, **kwargs)

    trainer.train = train_on


class _TransformersCallback(transformers.TrainerCallback):  # type: ignore[misc]  # it has no types
    """Reports and checkpoints.

    Args:
        files: The checkpoint that the trainer resumes from.
    """

    def __init__(self, files: Any) -> None:
        self._files = files

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> Any:
        numbers = {name: value for name, value in (logs or {}).items() if _is_number(value)}
        row = {**numbers, "step": state.global_step, "epoch": state.epoch}
        is_evaluated = any(name.startswith(_EVALUATED) for name in numbers)
        library_report(
            {} if is_evaluated else row,
            row if is_evaluated else {},
            step=state.global_step,
            evaluates=args.eval_strategy != transformers.IntervalStrategy.NO,
        )
        # A search may end the trial here.
        return self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if train.should_preempt():
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if train.world_size() > 1:
            # Each rank writes its random numbers into the directory.
            dist.barrier()
        if train.world_rank() == 0:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            step = {"step": state.global_step, "epoch": state.epoch}
            train.save_checkpoint({_KEY: folder.name, **step}, files=[folder])
        else:
            train.save_checkpoint()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
