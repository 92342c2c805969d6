"""Engines of PyTorch-Ignite, in train functions and in plain scripts."""

from collections.abc import Mapping
from typing import Any

from paceline import core
from paceline._base.imports import required_library
from paceline.integrations._library_reports import LibraryRun

required_library("ignite", "PacelineHandler", "pytorch-ignite")

from ignite.engine import Engine, Events  # noqa: E402  # after the check that it is there


class PacelineHandler:
    """Handler of Ignite's engines: `PacelineHandler().attach(trainer, evaluator)`.

    The trainer's output and metrics are reported, and the evaluator's metrics as validations. When
    the run is to make room, or a search stops it, the trainer ends after the present iteration:
    attach a handler that saves to `Events.TERMINATE`.

    In a train function it belongs to that run. Elsewhere it begins a run of
    `core.init`, which ends with the process; all ranks must have it.

    Args:
        context: A context of `core.init` to report to; you close it.
        every: Report training after so many iterations.
        options: Arguments of `core.init` for a run of its own, such as `name`.

    Raises:
        ImportError: Ignite is not installed.
        ValueError: `every` is below 1.
    """

    def __init__(
        self, context: core.Context | None = None, *, every: int = 50, **options: Any
    ) -> None:
        if every < 1:
            raise ValueError(f"`every` must be at least 1, but got {every}.")
        self._run = LibraryRun(context, options)
        self._every = every

    def attach(self, trainer: Engine, evaluator: Engine | None = None) -> None:
        """Report what a trainer does, and what an evaluator finds.

        Args:
            trainer: The engine that trains.
            evaluator: The engine that the trainer's handlers run for validation.
        """

        def end(_: Engine) -> None:
            self._run.is_training = False

        def fail(_: Engine, error: BaseException) -> None:
            self._run.close(error)
            # Ignite leaves an exception to a handler altogether.
            raise error

        def validate(engine: Engine) -> None:
            found = {**_numbers(engine.state.metrics), "epoch": trainer.state.epoch}
            self._run.report({}, found, step=trainer.state.iteration)

        trainer.add_event_handler(Events.STARTED, lambda _: self._run.begin())
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._step, evaluator is not None)
        trainer.add_event_handler(Events.COMPLETED | Events.TERMINATE, end)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, fail)
        if evaluator is not None:
            evaluator.add_event_handler(Events.COMPLETED, validate)

    def _step(self, trainer: Engine, evaluates: bool) -> None:
        state = trainer.state
        if state.iteration % self._every == 0:
            row = {**_numbers(state.output), **_numbers(state.metrics), "epoch": state.epoch}
            self._run.report(row, {}, step=state.iteration, evaluates=evaluates)
        if self._run.should_preempt():
            trainer.terminate()


def _numbers(values: Any) -> dict[str, float]:
    """Return the numbers of an output or of metrics by name; a number alone is a loss."""
    named = values if isinstance(values, Mapping) else {"loss": values}
    return {
        str(name): float(value)
        for name, value in named.items()
        if isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1
    }
