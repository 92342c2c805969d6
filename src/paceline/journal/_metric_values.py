"""Metric values: what may be reported, and how it travels through JSON.

JSON has no NaN and no infinities, and the fast encoders write them as null. They travel as
``{"$float": "nan" | "inf" | "-inf"}``; therefore reported dictionaries must not use that key.
"""

from math import isfinite, isnan
from typing import Any

NON_FINITE_KEY = "$float"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_PLAIN = (bool, str)


def encode_float(value: float) -> float | dict[str, str]:
    """Return `value`, tagged if JSON cannot hold it."""
    if isfinite(value):
        return value
    return {NON_FINITE_KEY: "nan" if isnan(value) else "inf" if value > 0 else "-inf"}


def encode_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON-able copy of reported metrics.

    Accepts numbers, strings, booleans, lists, nested dictionaries, NumPy scalars, 0-d tensors,
    NaN and infinities.

    Raises:
        TypeError: `metrics` or a value in it has another type; the message names its path.
        ValueError: A key is empty or reserved, or an integer needs more than 64 bits.
    """
    if type(metrics) is not dict and not hasattr(metrics, "items"):
        raise TypeError(
            f"`metrics` must be a dictionary of names to values, but got {type(metrics).__name__}."
        )
    encoded = {}
    for key, value in metrics.items():
        if type(value) is float and isfinite(value) and type(key) is str and key:
            encoded[key] = value
        else:
            encoded[_checked_key(key, "")] = _encode_metric(value, str(key))
    return encoded


def decode_value(value: Any) -> Any:
    """Return what `encode_metrics` was given (tuples come back as lists)."""
    if isinstance(value, dict):
        if len(value) == 1 and NON_FINITE_KEY in value:
            return float(value[NON_FINITE_KEY])
        return {key: decode_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    return value


def same_value(left: Any, right: Any) -> bool:
    """Compare two decoded or encoded metric values; NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float) and isnan(left) and isnan(right):
        return True
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def _checked_key(key: Any, path: str) -> str:
    where = f" in `{path}`" if path else ""
    if not isinstance(key, str):
        raise TypeError(
            f"Metric names must be strings, but got {key!r} ({type(key).__name__}){where}."
        )
    if not key or key == NON_FINITE_KEY:
        raise ValueError(
            f"Metric names must be non-empty and other than {NON_FINITE_KEY!r},"
            f" but got {key!r}{where}."
        )
    return key


def _encode_metric(value: Any, path: str) -> Any:
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    if type(value) is int:
        if not _INT64_MIN <= value <= _INT64_MAX:
            raise ValueError(
                f"Metric `{path}` must fit a signed 64-bit integer, but got {value}."
                " Hint: report it as a float or a string."
            )
        return value
    if isinstance(value, float):
        return encode_float(float(value))
    if isinstance(value, dict):
        return {_checked_key(k, path): _encode_metric(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_metric(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (int, str)):  # enumerations and other subclasses
        return _encode_metric(int(value) if isinstance(value, int) else str(value), path)
    return _encode_metric(_scalar_of_metric(value, path), path)


def _scalar_of_metric(value: Any, path: str) -> Any:
    """Return the Python scalar in a NumPy scalar, a 0-d array or a 0-d tensor."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "item"):
        raise TypeError(
            f"Metric `{path}` must be a number, string, boolean, list or nested dictionary,"
            f" but got {value!r} ({type(value).__name__})."
        )
    if len(shape) != 0:
        raise TypeError(
            f"Metric `{path}` must hold one value, but got {type(value).__name__} of shape"
            f" {tuple(shape)}. Hint: report `.mean()` of it, or `.tolist()` for a list."
        )
    scalar = value.item()
    if not isinstance(scalar, (bool, int, float, str)):
        raise TypeError(
            f"Metric `{path}` must hold a real number, string or boolean, but got {scalar!r}."
        )
    return scalar
