"""Request of a run: the function and its options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core import Tracker
from paceline.train._checkpoint import Checkpoint
from paceline.train._config import CheckpointStrategy
from paceline.train._run_callbacks import TrainingCallback
from paceline.workers.runs import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Arguments of `Trainer.run`.

    Attributes:
        function: The train function, or the instance of a class to make.
        config: What it is given.
        dataset: What `get_dataset` returns in it.
        has_dataset: Whether there is one.
        checkpoint: What to go on from, if it is stored.
        state: The same, if it is a state in memory.
        strategy: Which checkpoints to keep.
        callbacks: Who follows the run.
        trackers: What else shows the run.
        max_retries: How often workers may be lost.
        is_seed_given: Whether the user has asked for a seed.
        check_ranks: Whether workers are compared, see `Trainer`.
        is_stepwise: Whether the function waits at each report until it may go on.
    """

    function: Callable[..., Any] | Instance
    config: dict[str, Any] | None
    dataset: Any
    has_dataset: bool
    checkpoint: Checkpoint | None
    state: Any
    strategy: CheckpointStrategy
    callbacks: Sequence[TrainingCallback]
    trackers: Sequence[Tracker]
    max_retries: float
    is_seed_given: bool = False
    check_ranks: bool | tuple[str, ...] = True
    is_stepwise: bool = False
