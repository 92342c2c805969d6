"""The trainer of Hugging Face's Transformers, in train functions and in plain scripts."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from paceline import core, train
from paceline._base.imports import required_library
from paceline.integrations._library_reports import LibraryRun

required_library("transformers", "PacelineCallback", "transformers")

import transformers  # noqa: E402  # after the check that it is there

_KEY = "transformers"
_EVALUATED = "eval_"


def prepare_transformers(trainer: Any) -> Any:
    """Have a trainer of Transformers report, save checkpoints of the run, and resume from the last.

    It gets a `PacelineCallback`, and `train()` without `resume_from_checkpoint` resumes from the
    run's checkpoint. Of the trainer's own directories only the newest is kept, unless
    `save_total_limit` says otherwise.

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
    callback = PacelineCallback(store_checkpoints=True)
    trainer.add_callback(callback)
    if (place := callback.latest_checkpoint) is not None:
        _go_on_from(trainer, place)
    return trainer


def _go_on_from(trainer: Any, place: str) -> None:
    """Make `train` start from a checkpoint, unless given another checkpoint."""
    own = trainer.train

    def train_on(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        resume = place if resume_from_checkpoint is None else resume_from_checkpoint
        return own(resume, *args, **kwargs)

    trainer.train = train_on


class PacelineCallback(transformers.TrainerCallback):  # type: ignore[misc]  # it has no types
    """Callback for `Trainer(callbacks=[PacelineCallback()])` of Transformers and TRL.

    What the trainer logs is reported, evaluations as validations: metrics with names that begin
    with `eval_`, or all that it logs if `args` has no `eval_strategy`. When the run is to make
    room, or a search stops it, the trainer saves after the present step, and training ends.

    In a train function it belongs to that run. Elsewhere it begins a run of
    `core.init`, which ends with the process; all ranks must have it.

    Args:
        context: A context of `core.init` to report to; you close it.
        store_checkpoints: Whether the run's storage gets a copy of what the trainer saves. By
            default a checkpoint of the run has the path alone, as metadata. A train function always
            stores a copy.
        options: Arguments of `core.init` for a run of its own, such as `name`.
    """

    def __init__(
        self,
        context: core.Context | None = None,
        *,
        store_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        self._run = LibraryRun(context, options)
        self._stores = store_checkpoints
        self._files: Any = None

    @property
    def latest_checkpoint(self) -> str | None:
        """The directory for `train(resume_from_checkpoint=)`; None at a fresh start.

        Raises:
            FileNotFoundError: The trainer's directory is gone, and no copy was stored.
        """
        if self._run.context is not None:
            return self._run.latest_checkpoint()
        # The files stay as long as the trainer has the callback.
        self._files = TemporaryDirectory(prefix="paceline-transformers-")
        state = train.load_checkpoint(files_to=self._files.name)
        if isinstance(state, Mapping) and _KEY in state:
            return str(Path(self._files.name) / state[_KEY])
        return None

    def on_init_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Have a new run record the arguments that are not the default ones."""
        defaults = {field.name: field.default for field in fields(args)}
        given = args.to_sanitized_dict().items()
        self._run.set_hparams({key: value for key, value in given if value != defaults.get(key)})

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin the run."""
        self._run.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note that training has ended."""
        self._run.is_training = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> Any:
        """Report numbers."""
        numbers = {name: value for name, value in (logs or {}).items() if _is_number(value)}
        row = {**numbers, "step": state.global_step, "epoch": state.epoch}
        is_evaluated = any(name.startswith(_EVALUATED) for name in numbers)
        self._run.report(
            {} if is_evaluated else row,
            row if is_evaluated else {},
            step=state.global_step,
            evaluates=args.eval_strategy != transformers.IntervalStrategy.NO,
        )
        # A search may end the trial here.
        return self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Have the trainer save and stop if the run is to make room."""
        if self._run.should_preempt():
            # Once: a later save would have random numbers that an evaluation has drawn meanwhile.
            control.should_save = control.should_save or not control.should_training_stop
            control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Keep what the trainer has saved as a checkpoint of the run."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._run.context is not None:
            self._run.keep_checkpoint(folder, state.global_step, stores=self._stores)
            return
        if train.world_size() > 1:
            # Each rank writes its random numbers into the directory.
            dist.barrier()
        if train.world_rank() == 0:
            step = {"step": state.global_step, "epoch": state.epoch}
            train.save_checkpoint({_KEY: folder.name, **step}, files=[folder])
        else:
            train.save_checkpoint()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
