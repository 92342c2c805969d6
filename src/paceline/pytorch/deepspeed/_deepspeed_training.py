"""One trial in training by DeepSpeed's engines."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.engine import (
    DeepSpeedState,
    Destination,
    MetricSums,
    Schedule,
    ShardedData,
    StopReason,
    batches_by_rank,
)
from paceline.pytorch._trial_training import TrialTraining
from paceline.pytorch._trial_validator import Validator
from paceline.pytorch.deepspeed._deepspeed_context import DeepSpeedTrialContext
from paceline.pytorch.deepspeed._deepspeed_trial import DeepSpeedTrial


class DeepSpeedTraining(TrialTraining):
    """A trial's data, loop, callbacks and checkpoints; the engines store their own states.

    Args:
        trial: The trial.
        context: The context that the trial was made with.
        validator: How the trial validates.
    """

    state_type = DeepSpeedState
    # An engine steps after a fixed number of micro-batches.
    needs_whole_batches = True

    def __init__(
        self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, validator: Validator
    ) -> None:
        super().__init__(trial, context, validator)
        train_batch = trial.train_batch
        self._train_batch = lambda batch, epoch_idx, batch_idx: train_batch(
            _only(batch, "train_batch"), epoch_idx, batch_idx
        )
        self._stepper = context.stepper

    def fit(self, schedule: Schedule, *, is_test: bool, is_validated_first: bool) -> StopReason:
        """Train to a length; see `TrainingFit.fit`.

        Raises:
            ValueError: An optimizer step is to have several batches.
        """
        frequency = self._context.accumulation.frequency
        if frequency > 1:
            raise ValueError(
                f"`aggregation_frequency` must be 1 with DeepSpeed, but got {frequency}. Hint: set"
                " `gradient_accumulation_steps` in the config of DeepSpeed."
            )
        return super().fit(schedule, is_test=is_test, is_validated_first=is_validated_first)

    def _read_files(self, path: Path) -> dict[str, Any]:
        parts = super()._read_files(path)
        self._stepper.load(path, parts["training"])
        return parts

    def _begin_part(self, destination: Destination) -> Destination:
        return self._stepper.store(destination)


class DeepSpeedValidator(Validator):
    """Run a trial's validation, with equally many forward passes on all ranks if need be.

    Raises:
        ValueError: Neither or both of the evaluate methods are overridden, or the chief alone
            would validate a model whose parameters are divided among the ranks.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        super().__init__(trial, context)
        self._last_batch: Any = None
        is_divided = context.stepper.divides_parameters and context.distributed.size > 1
        self._is_together = is_divided
        if is_divided and not self.is_by_batch:
            raise ValueError(
                "With ZeRO stage 3 a trial must override `evaluate_batch`, as all ranks run each"
                f" forward pass together, but {type(trial).__name__} overrides"
                " `evaluate_full_dataset`."
            )

    def _run_batches(self, data: ShardedData, limit: int | None) -> tuple[list[Any], MetricSums]:
        num_more = self._num_more(data, limit) if self._is_together else 0
        outcome = super()._run_batches(data, limit)
        collected = self._context.reducers.state()
        for index in range(num_more):
            self._evaluate(self._last_batch, index)
        self._context.reducers.load_state(collected)
        self._last_batch = None
        return outcome

    def _num_more(self, data: ShardedData, limit: int | None) -> int:
        """Return how many forward passes of other ranks this one must join after its own."""
        distributed = self._context.distributed
        counts = batches_by_rank(data, limit, distributed.size)
        if min(counts) == 0:
            raise ValueError(
                "With ZeRO stage 3 the validation data must have a length and give each rank at"
                f" least one batch, but the ranks get {counts}. Hint: a map-style data set, and"
                " smaller batches."
            )
        return max(counts) - counts[distributed.rank]

    def _evaluate(self, batch: Any, index: int) -> Mapping[str, Any]:
        if self._is_together:
            self._last_batch = batch
        return super()._evaluate(_only(batch, "evaluate_batch"), index)


def _only(batch: Any, method: str) -> Iterator[Any]:
    yield batch
    raise RuntimeError(
        f"`{method}` must take one micro-batch in each call, but asked for a second one. Hint:"
        " next(dataloader_iter), once."
    )
