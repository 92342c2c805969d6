"""Statistics of a pass: of one worker, and of all as one dictionary."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.core import DistributedContext, NonFiniteError
from paceline.engine.metrics._weighted_means import WeightedMeans

_COUNTS = ("epoch", "batch_count")


class PassSeconds(NamedTuple):
    """What a pass has taken on one rank, in seconds.

    Attributes:
        whole: All of it.
        data_wait: The wait for batches.
        checkpoint: The capture of the state.
    """

    whole: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0


class PassResult(NamedTuple):
    """Result of a pass on one rank.

    Attributes:
        statistics: What the function returned, and counts.
        num_samples: The samples of this rank, as the weight of its statistics.
        num_batches: The batches of the pass.
        last_own: Of a default function: which batch of the pass this rank's last one is, and its
            samples; its "last_" values are of these.
        state: The rank's part of the state, if it was wanted and is not in the file.
        seconds: What it has taken.
    """

    statistics: dict[str, Any]
    num_samples: int
    num_batches: int
    last_own: tuple[int, int] | None = None
    state: dict[str, Any] | None = None
    seconds: PassSeconds = PassSeconds()


class LocalMeans:
    """Means over this worker's own samples, and the values of the last batch.

    Args:
        stop_on_nan: Whether `statistics` looks for losses that are not finite.
        rank: The rank, for the message about such a loss.
        max_in_a_row: How many of them in a row are too many.
    """

    def __init__(self, *, stop_on_nan: bool = False, rank: int = 0, max_in_a_row: int = 1) -> None:
        single = DistributedContext.single()
        self._means = WeightedMeans(single, "pass", stop_on_nan=stop_on_nan, rank=rank)
        self._means.max_in_a_row = max_in_a_row
        self._last: dict[str, torch.Tensor] = {}

    def add(self, metrics: dict[str, torch.Tensor], num_samples: int, batch: int = 0) -> None:
        """Add the metrics of a batch.

        Without samples of its own a worker only takes part in what needs all of them.
        """
        if num_samples:
            self._means.add(metrics, num_samples, batch)
            self._last = metrics

    def statistics(self) -> dict[str, Any]:
        """Return the means, and the last values as "last_" and the name.

        Raises:
            NonFiniteError: A loss was not finite and training is to stop then.
        """
        means = self._means.reduce() or {}
        try:
            self._means.check_finite(means)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error} The pass has ended, so the batch is not known any more, and its layer is"
                " not either. Hint: load the state before the pass, with a smaller learning rate;"
                " stop_on_nan=False trains on.",
                rank=error.rank,
                batch=error.batch,
            ) from None
        statistics: dict[str, Any] = {}
        for name, last in self._last.items():
            statistics |= {name: means[name], f"last_{name}": last.item()}
        return statistics


def reduced_statistics(results: Sequence[PassResult]) -> dict[str, Any]:
    """Return the statistics of all ranks: numbers weighted by samples, ``num_samples`` summed.

    Other values are those of rank 0; dictionaries within are reduced as well. A worker without
    samples of its own counts only if none has any, and in the last batch only if it has some there.
    """
    counting = [result for result in results if result.num_samples] or list(results)
    weights = [result.num_samples or 1 for result in counting]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    means = _means_of_pass([result.statistics for result in counting], shares)
    means |= _last_values(results)
    every = [result.statistics for result in results]
    for name in _COUNTS:
        if all(_is_number(statistics.get(name)) for statistics in every):
            means[name] = max(statistics[name] for statistics in every)
    if all(_is_number(statistics.get("num_samples")) for statistics in every):
        means["num_samples"] = sum(statistics["num_samples"] for statistics in every)
    return means


def _last_values(results: Sequence[PassResult]) -> dict[str, float]:
    """Return the values of the last batch, of the ranks that have samples in it."""
    places = [result.last_own or (0, 0) for result in results]
    last = max(position for position, _ in places)
    if last == 0:
        return {}
    sizes = [size if position == last else 0 for position, size in places]
    ranks = [rank for rank, size in enumerate(sizes) if size]
    shares = [sizes[rank] / sum(sizes) for rank in ranks]
    first = results[ranks[0]].statistics
    return {
        name: _dot([results[rank].statistics[name] for rank in ranks], shares)
        for name in first
        if name.startswith("last_")
    }


def _means_of_pass(parts: Sequence[dict[str, Any]], shares: Sequence[float]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [part.get(name) for part in parts]
        if all(map(_is_number, values)):
            # With one worker a value stays what it is.
            means[name] = first if len(values) == 1 else _dot(values, shares)
        elif all(isinstance(value, dict) for value in values):
            means[name] = _means_of_pass(
                [value for value in values if isinstance(value, dict)], shares
            )
        else:
            means[name] = first
    return means


def _dot(values: Sequence[Any], shares: Sequence[float]) -> float:
    return float(sum(value * share for value, share in zip(values, shares, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
