"""Statistics of all workers, as one dictionary."""

from collections.abc import Sequence
from typing import Any

from paceline.creators._spec import PassResult

_COUNTS = ("epoch", "batch_count")


def reduced(results: Sequence[PassResult]) -> dict[str, Any]:
    """Return the statistics of all ranks: numbers weighted by samples, ``num_samples`` summed.

    Other values are those of rank 0; dictionaries within are reduced as well. A worker without
    samples of its own counts only if none has any, and in the last batch only if it has some there.
    """
    counting = [result for result in results if result.num_samples] or list(results)
    weights = [result.num_samples or 1 for result in counting]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    means = _means([result.statistics for result in counting], shares)
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


def _means(parts: Sequence[dict[str, Any]], shares: Sequence[float]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [part.get(name) for part in parts]
        if all(map(_is_number, values)):
            # With one worker a value stays what it is.
            means[name] = first if len(values) == 1 else _dot(values, shares)
        elif all(isinstance(value, dict) for value in values):
            means[name] = _means([value for value in values if isinstance(value, dict)], shares)
        else:
            means[name] = first
    return means


def _dot(values: Sequence[Any], shares: Sequence[float]) -> float:
    return float(sum(value * share for value, share in zip(values, shares, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
