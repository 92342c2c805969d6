"""Training and validation of one trial: its facts in checkpoints, resume checks.

Also: validation over ranks.
"""

import copy
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from paceline import faults
from paceline._training.engine.fsdp_and_tensor_parallel import RankGrid, unsharded
from paceline._training.engine.metric_reducers import Reducer
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.schedules import Position
from paceline._training.engine.weighted_means import KeySetError
from paceline.core._distributed_context import DistributedContext
from paceline.data._order_and_random_generators import worker_shards
from paceline.data._sharded_loader import ShardedData
from paceline.pytorch._loop_agreement import TrainsShard
from paceline.pytorch._resumable_training import ResumableTraining
from paceline.pytorch._training_callbacks import TrainingCallbacks
from paceline.pytorch._trial_and_context import PyTorchCallback, PyTorchTrial, PyTorchTrialContext
from paceline.storage._checkpoint_errors import CheckpointMismatchError

logger = logging.getLogger(__name__)


def trial_checkpoint_facts(trial: object, context: PyTorchTrialContext) -> dict[str, Any]:
    """Return the facts for `load_trial_from_checkpoint_path` to rebuild the trial."""
    kind = type(trial)
    module, source = kind.__module__, None
    if module == "__main__":
        main = sys.modules["__main__"]
        source = Path(getattr(main, "__file__", None) or "a notebook").name
        # A program that was started by `python -m` can be imported by that name.
        module = getattr(getattr(main, "__spec__", None), "name", None) or module
    hparams, unstored = checkpoint_hparams(context)
    return {
        "trial": {"class": f"{module}:{kind.__qualname__}", "source": source},
        "hparams": hparams,
        "unstored_hparams": unstored,
        "data_config": context.get_data_config(),
    }


def checkpoint_hparams(context: PyTorchTrialContext) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the hyperparameters to store in a checkpoint, and the names of the others."""
    try:
        given = context.get_hparams()
    except ValueError:
        return None, []
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    return plain, sorted(given.keys() - plain.keys())


def _is_plain(value: Any) -> bool:
    """Tell whether a hyperparameter can be stored."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value is None or isinstance(value, (bool, int, float, str)) or is_scalar


def facts_changed_on_resume(
    training: Mapping[str, Any], context: PyTorchTrialContext
) -> list[tuple[str, Any, Any]]:
    """Return the changed hyperparameters, with their values in a checkpoint and now.

    Args:
        training: The checkpoint's state that all ranks share.
        context: The context of the resumed training.

    Raises:
        CheckpointMismatchError: The seed was changed.
    """
    _check_seed(training["seed"], context.given_seed)
    # Hyperparameters of the same run are already compared when the run is resumed.
    is_same_run = context.core.latest_checkpoint is not None
    return [] if is_same_run else _changed_hparams(training, context)


def _check_seed(stored: int, given: int | None) -> None:
    if given not in (None, stored):
        raise CheckpointMismatchError(
            f"`seed` must be {stored}, as the checkpoint's order of samples depends on it, but got"
            f" {given}. Hint: leave it out; or begin a new training with the checkpoint's weights"
            " (`pytorch.load_weights_from_checkpoint_path`)."
        )


def _changed_hparams(
    training: Mapping[str, Any], context: PyTorchTrialContext
) -> list[tuple[str, Any, Any]]:
    before, (now, unstored) = training["hparams"], checkpoint_hparams(context)
    if before is None or now is None:
        return []
    left_out = {*unstored, *training["unstored_hparams"]}
    return [
        (f"hyperparameter {name}", before.get(name), now.get(name))
        for name in sorted((before.keys() | now.keys()) - left_out)
        if before.get(name) != now.get(name)
    ]


def evaluate_batches(
    data: ShardedData,
    evaluate: Callable[[Any, int], object],
    stepper: Stepper,
    distributed: DistributedContext,
    limit: int | None = None,
) -> None:
    """Evaluate this rank's batches of a validation set; collective over all ranks.

    Args:
        data: The data in shards.
        evaluate: Takes a batch and its index among this rank's batches.
        stepper: The stepper, which knows the models.
        distributed: Where the ranks meet.
        limit: At most so many batches of this rank; None for all.
    """
    batches = _own_batches(data)
    with ExitStack() as stack:
        if stepper.is_sharded:
            counts = batches_by_rank(data, limit, stepper.grid.data_size)
            batches = _with_whole_models(batches, counts, data, stepper, stack)
        for index, batch in enumerate(batches):
            if limit is not None and index >= limit:
                break
            faults.reach("engine.validation")
            evaluate(batch, index)


def evaluate_on_chief(
    evaluate: Callable[[], Mapping[str, Any]], stepper: Stepper, distributed: DistributedContext
) -> dict[str, Any]:
    """Return the chief's result of `evaluate` on all ranks; collective over all ranks.

    The ranks of the chief's tensor-parallel group evaluate with it, as they hold one model.
    """
    metrics: dict[str, Any] = {}
    with ExitStack() as stack:
        if stepper.is_sharded:
            stack.enter_context(unsharded(stepper.models))
        if stepper.grid.data_rank == 0:
            metrics = dict(evaluate())
    timeout_s = distributed.timeout_s
    # The chief may be at it for hours; its death is noticed all the same.
    distributed.timeout_s = math.inf
    try:
        return distributed.broadcast(metrics)
    finally:
        distributed.timeout_s = timeout_s


def _with_whole_models(
    batches: Iterator[Any], counts: list[int], data: ShardedData, stepper: Stepper, stack: ExitStack
) -> Iterator[Any]:
    """Yield the batches; sharded models are whole from where the first rank has none left.

    Until then all ranks gather each unit of a model together.
    """
    if len(set(counts)) > 1 or data.is_iterable:
        yield from islice(batches, min(counts))
        stack.enter_context(unsharded(stepper.models))
    yield from batches


def batches_by_rank(data: ShardedData, limit: int | None, world_size: int) -> list[int]:
    """Return how many batches each rank validates; 0 where that is unknown in advance.

    Args:
        data: The data.
        limit: At most so many batches of a rank; None for all.
        world_size: The number of ranks that have other samples each.
    """
    order = None if data.is_iterable else data.order(0)
    if order is None:
        return [0]
    whole, rest = divmod(len(order.shards), data.num_shards)
    counts = []
    for rank in range(world_size):
        own = worker_shards(data.num_shards, rank, world_size)
        count = whole * len(own) + sum(shard < rest for shard in own)
        counts.append(count if limit is None else min(count, limit))
    return counts


def _own_batches(data: ShardedData) -> Iterator[Any]:
    """Return this rank's batches of the whole validation set."""
    if data.is_iterable:
        return chain.from_iterable(data.iterate_stream(agrees=False))
    return data.iterate(0)


class MetricSums:
    """Combine the metrics of batches, each by its reducer.

    Args:
        reducers: One reducer for all metrics, or one per metric.
        grid: Which ranks have the same samples; by default each has others.
    """

    def __init__(
        self, reducers: Reducer | dict[str, Reducer], grid: RankGrid | None = None
    ) -> None:
        self._reducers = reducers
        self._grid = grid
        self._values: dict[str, Any] = {}
        self._weight = 0

    def add(self, metrics: Mapping[str, Any], num_samples: int) -> None:
        """Add the metrics of a batch.

        Raises:
            KeySetError: The names differ from the names in earlier batches.
            TypeError: A value is no number, tensor or array; the message names it.
            ValueError: The reducers do not name exactly the metrics.
        """
        if self._values and metrics.keys() != self._values.keys():
            raise KeySetError(
                "All batches must return the same validation metrics, but one returned"
                f" {sorted(metrics)} and those before {sorted(self._values)}."
            )
        if isinstance(self._reducers, dict) and self._reducers.keys() != metrics.keys():
            raise ValueError(
                "`evaluation_reducer` must name exactly the metrics, but names"
                f" {sorted(self._reducers)} while `evaluate_batch` returned {sorted(metrics)}."
            )
        for name, value in metrics.items():
            number = _number_of_metric(name, value)
            reducer = self._reducer(name)
            if reducer is Reducer.AVG:
                number = number * num_samples
            held = self._values.get(name)
            self._values[name] = (
                number if held is None else _combine_validation_values(reducer, held, number)
            )
        self._weight += num_samples

    def reduce(self, distributed: DistributedContext) -> dict[str, Any]:
        """Return the metrics over all ranks.

        Raises:
            KeySetError: Ranks hold different names.
            ValueError: There was no batch on any rank.
        """
        own = ({name: float(value) for name, value in self._values.items()}, self._weight)
        by_rank: Sequence[Any] = distributed.allgather(own)
        if self._grid is not None:
            by_rank = self._grid.one_per_group(by_rank)
        shares = [share for share in by_rank if share[0]]
        if not shares:
            raise ValueError("The validation loader must give at least one batch, but gave none.")
        names = shares[0][0].keys()
        for values, _ in shares:
            if values.keys() != names:
                raise KeySetError(
                    "All ranks must return the same validation metrics, but one returned"
                    f" {sorted(names)} and another {sorted(values)}."
                )
        total = sum(weight for _, weight in shares)
        reduced: dict[str, Any] = {}
        for name in names:
            reducer = self._reducer(name)
            value = shares[0][0][name]
            for values, _ in shares[1:]:
                value = _combine_validation_values(reducer, value, values[name])
            reduced[name] = value / total if reducer is Reducer.AVG else value
        return reduced

    def _reducer(self, name: str) -> Reducer:
        return self._reducers[name] if isinstance(self._reducers, dict) else self._reducers


def _number_of_metric(name: str, value: Any) -> Any:
    """Return a number, or the mean of the elements of a tensor or an array."""
    try:
        if not isinstance(value, torch.Tensor):
            if not getattr(value, "shape", ()):
                return float(value)
            value = torch.as_tensor(value)
        return value.detach().double().mean()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`evaluate_batch` must return numbers, tensors or arrays, but {name!r} is"
            f" {value!r:.60} ({type(value).__name__}). Hint: collect other values by"
            " `context.wrap_reducer`."
        ) from error


def _combine_validation_values(reducer: Reducer, left: Any, right: Any) -> Any:
    if reducer in (Reducer.AVG, Reducer.SUM):
        return left + right
    if isinstance(left, float) and isinstance(right, float):
        return max(left, right) if reducer is Reducer.MAX else min(left, right)
    left, right = torch.as_tensor(left), torch.as_tensor(right)
    return torch.maximum(left, right) if reducer is Reducer.MAX else torch.minimum(left, right)


class Validator:
    """Run a trial's validation.

    Raises:
        ValueError: Neither or both of the evaluate methods are overridden.
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        has_batch = type(trial).evaluate_batch is not PyTorchTrial.evaluate_batch
        has_full = type(trial).evaluate_full_dataset is not PyTorchTrial.evaluate_full_dataset
        if has_batch == has_full:
            found = "both" if has_batch else "neither"
            raise ValueError(
                "A trial must override exactly one of `evaluate_batch` and `evaluate_full_dataset`,"
                f" but {type(trial).__name__} overrides {found}."
            )
        self._trial = trial
        self._context = context
        self.is_by_batch = has_batch
        self.keeps_outputs = True
        self._takes_index = len(inspect.signature(trial.evaluate_batch).parameters) > 1

    def run(
        self, data: ShardedData | None, loader: Any, limit: int | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the metrics, the same on every rank, and this rank's metrics of each batch.

        Args:
            data: The data in shards, for `evaluate_batch`.
            loader: The user's loader, for `evaluate_full_dataset`.
            limit: At most so many batches of this rank; None for all.
        """
        with torch.no_grad(), self._context.stepper.autocast():
            if self.is_by_batch:
                assert data is not None
                outputs, sums = self._run_batches(data, limit)
                metrics = sums.reduce(self._context.distributed)
            else:
                outputs = []
                metrics = evaluate_on_chief(
                    lambda: self._trial.evaluate_full_dataset(loader),
                    self._context.stepper,
                    self._context.distributed,
                )
            metrics |= self._context.reducers.reduce(self._context.distributed, for_training=False)
        return metrics, outputs

    def _run_batches(self, data: ShardedData, limit: int | None) -> tuple[list[Any], MetricSums]:
        context = self._context
        sums = MetricSums(self._trial.evaluation_reducer(), context.stepper.grid)
        outputs: list[Any] = []

        def evaluate(batch: Any, index: int) -> None:
            context.reducers.batch = index // len(data.own_shards)
            if context.moves_data:
                batch = context.to_device(batch)
            metrics = self._evaluate(batch, index)
            sums.add(metrics, self._trial.get_batch_length(batch))
            if self.keeps_outputs:
                outputs.append(metrics)

        evaluate_batches(data, evaluate, context.stepper, context.distributed, limit)
        return outputs, sums

    def _evaluate(self, batch: Any, index: int) -> Mapping[str, Any]:
        metrics = (
            self._trial.evaluate_batch(batch, index)
            if self._takes_index
            else self._trial.evaluate_batch(batch)
        )
        if not isinstance(metrics, Mapping):
            raise TypeError(
                "`evaluate_batch` must return a dictionary of metrics, but returned a"
                f' {type(metrics).__name__}. Hint: return {{"validation_loss": value}}.'
            )
        return metrics


class TrialTraining(ResumableTraining):
    """Training of a trial, as a whole or in pieces.

    Args:
        trial: The trial.
        context: The context that the trial was made with.
        validator: How the trial validates.
    """

    def __init__(
        self, trial: PyTorchTrial, context: PyTorchTrialContext, validator: Validator
    ) -> None:
        callbacks = TrainingCallbacks(trial.build_callbacks(), PyTorchCallback)
        super().__init__(context, callbacks, validates_batches=validator.is_by_batch)
        self._trial = trial
        self._train_batch = trial.train_batch
        self._context = context
        self._validator = validator
        self._has_warned = context.distributed.rank > 0
        validator.keeps_outputs = callbacks.overrides("on_validation_epoch_end")

    def make_loaders(self) -> tuple[Any, Any]:
        """Return the trial's loaders."""
        training = self._trial.build_training_data_loader()
        return training, self._trial.build_validation_data_loader()

    def facts(self) -> dict[str, Any]:
        """Return the facts for rebuilding the trial from a checkpoint."""
        return trial_checkpoint_facts(self._trial, self._context)

    def changed_facts(self, training: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the hyperparameters changed since a checkpoint."""
        return facts_changed_on_resume(training, self._context)

    def run_validation(
        self, data: ShardedData | None, loader: Any, limit: int | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the metrics of validation data, and this rank's metrics of each batch."""
        return self._validator.run(data, loader, limit)

    # ---- for the loop --------------------------------------------------------------------

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on a shard and return its metrics."""
        self._context.reducers.batch = position.batches
        if self._has_warned or not self.leaves_out_ranks():
            return self._train_shard(data, position.epochs, position.batches)
        before = self._own_numbers()
        metrics = self._train_shard(data, position.epochs, position.batches)
        self._warn_of_own_numbers(before, position)
        return metrics

    def keep_for_replay(self) -> Callable[[], None]:
        """Note what `train_shard` changes besides models; return a function to put it back."""
        own, reducers = self._own(), self._context.reducers
        numbers = {k: v for k, v in own.items() if type(v) in (int, float, bool)}
        collected = reducers.state()
        schedulers = [entry.scheduler for entry in self._context.lr_schedulers]
        steps = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        # Whether gradients are unscaled; torch keeps it nowhere else.
        stages = getattr(self._context.scaler, "_per_optimizer_states", {})
        before = {key: dict(stage) for key, stage in stages.items()}

        def restore() -> None:
            own.update(numbers)
            reducers.load_state(collected)
            for scheduler, state in zip(schedulers, steps, strict=True):
                scheduler.load_state_dict(state)
            stages.clear()
            stages.update(before)

        return restore

    def _own(self) -> dict[str, Any]:
        """Return the attributes of the trial."""
        return vars(getattr(self._trial, "own_code", self._trial))

    def _own_numbers(self) -> dict[str, Any]:
        """Return the trial's own numbers, and how often its models not wrapped were changed."""
        own = self._own()
        wrapped = {id(p) for p in self._context.stepper.parameters()}
        changes = {
            name: sum(p._version for p in value.parameters())
            for name, value in own.items()
            if isinstance(value, torch.nn.Module)
            and wrapped.isdisjoint(map(id, value.parameters()))
        }
        return {k: v for k, v in own.items() if type(v) in (int, float, bool)} | changes

    def _warn_of_own_numbers(self, before: Mapping[str, Any], position: Position) -> None:
        """Warn once about objects that lag on ranks without samples, which skip `train_batch`."""
        after = self._own_numbers()
        if changed := [name for name in before if after.get(name) != before[name]]:
            self._has_warned = True
            logger.warning(
                "Batch %d leaves ranks without samples, as the last one of an epoch has too few:"
                " their `train_batch` is not called, so `self.%s` is behind there. Hint:"
                " drop_last=True of the loader; count by `batch_idx`, which is the same on all"
                " ranks; give a model to context.wrap_model.",
                position.batches,
                changed[0],
            )

    def plain_training(self) -> TrainsShard:
        """Return the function to train the next shards with: `train_batch`, wrapped if needed."""
        if self._keeps_batches:
            return self._train_shard
        stepper, train_batch = self._context.stepper, self._train_batch
        if stepper.computes_in_fp32:
            return train_batch
        # Made once, as this asks torch for the device's abilities.
        autocast = stepper.autocast()

        def train(data: Any, epochs: int, batches: int) -> Any:
            with autocast:
                return train_batch(data, epochs, batches)

        return train

    def metrics_of(self, returned: Any) -> Mapping[str, Any]:
        """Return the metrics from a return value of `train_batch`."""
        if isinstance(returned, torch.Tensor):
            return {"loss": returned}
        if not isinstance(returned, Mapping):
            raise TypeError(
                "`train_batch` must return a dictionary of metrics or a tensor, but returned a"
                f" {type(returned).__name__}."
            )
        return returned

    def _train_shard(self, data: Any, epochs: int, batches: int) -> Mapping[str, Any]:
        if self._context.stepper.computes_in_fp32:
            returned = self._train_batch(data, epochs, batches)
        else:
            with self._context.stepper.autocast():
                returned = self._train_batch(data, epochs, batches)
        metrics = returned if type(returned) is dict else self.metrics_of(returned)
        if self._keeps_batches:
            # Copies without a graph: trials reuse tensors, and a graph would keep its memory.
            self._batch_metrics.append(
                {k: v.detach().clone() if hasattr(v, "detach") else v for k, v in metrics.items()}
            )
        return metrics

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""
        return self._trial.get_batch_length(data)
