"""Default batches from samples, and what keeps samples from one batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_HINT = (
    " Hint: `map` makes them alike, such as images of one size, or a number in place of None; or"
    " `collate` of `to_torch` (`collate_fn` of a DataLoader) makes a batch of a list of samples."
)


def _load_and_collate(samples: list[Any]) -> Any:
    # The first batch loads torch; an import statement would cost something with every batch.
    global _default_collate
    from torch.utils.data import default_collate

    _default_collate = default_collate
    return default_collate(samples)


_default_collate: Callable[[list[Any]], Any] = _load_and_collate


def collate_samples(samples: Any) -> Any:
    """Return samples as a batch by torch's `default_collate`, with clearer errors.

    Args:
        samples: A list of samples.

    Raises:
        ValueError: Arrays have different shapes, or dictionaries different keys.
        TypeError: Values such as None are in no tensor.
    """
    try:
        return _default_collate(samples)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        # torch's own error does not say which sample differs, nor in what.
        reason = _batch_reason("a sample", list(samples))
        if reason is None:
            raise
        kind = ValueError if isinstance(error, (KeyError, RuntimeError)) else TypeError
        raise kind(f"The samples of a batch must be alike, but {reason}.{_HINT}") from error


def _batch_reason(name: str, values: Sequence[Any]) -> str | None:
    """Return how the values of a batch differ, or None if no difference is found."""
    for kind, reason_of in ((Mapping, _batch_reason_of_keys), ((list, tuple), _length_reason)):
        if all(isinstance(value, kind) for value in values):
            return reason_of(name, values)
    if all(hasattr(value, "shape") for value in values):
        shapes = dict.fromkeys(str(list(value.shape)) for value in values)
        return f"{name} has the shapes {_first_of(shapes)}" if len(shapes) > 1 else None
    for kinds in ((int, float), (str, bytes)):
        if all(isinstance(value, kinds) for value in values):
            return None
    kinds_had = dict.fromkeys("None" if v is None else type(v).__name__ for v in values)
    return f"{name} is {' or '.join(kinds_had)}"


def _batch_reason_of_keys(name: str, values: Sequence[Mapping[Any, Any]]) -> str | None:
    first = values[0]
    keys = dict.fromkeys(str(sorted(map(str, value))) for value in values)
    if len(keys) > 1:
        return f"{name} has the keys {_first_of(keys)}"
    reasons = (_batch_reason(_named(name, key), [value[key] for value in values]) for key in first)
    return next((reason for reason in reasons if reason), None)


def _length_reason(name: str, values: Sequence[Sequence[Any]]) -> str | None:
    lengths = dict.fromkeys(str(len(value)) for value in values)
    if len(lengths) > 1:
        return f"{name} has the lengths {_first_of(lengths)}"
    places = enumerate(zip(*values, strict=True))
    reasons = (_batch_reason(f"{name}[{place}]", each) for place, each in places)
    return next((reason for reason in reasons if reason), None)


def _first_of(texts: Iterable[str]) -> str:
    return " and ".join(list(texts)[:3])


def _named(name: str, key: Any) -> str:
    return f"`{key}`" if name == "a sample" else f"{name}[{key!r}]"
