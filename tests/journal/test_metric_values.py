from enum import IntEnum
from math import inf, nan
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.journal_records import decode_value, encode_float, encode_metrics, same_value


class Color(IntEnum):
    RED = 3


scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8"))
)
keys = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda key: key != "$float")
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner))


@pytest.mark.long
@given(st.dictionaries(keys, values))
def test_metrics_survive_the_way_through_json(metrics: dict[str, Any]) -> None:
    encoded = msgspec.json.decode(msgspec.json.encode(encode_metrics(metrics)))
    assert same_value(decode_value(encoded), metrics)


@pytest.mark.parametrize("text", ["zz", "1", None, ["nan"]])
def test_what_is_no_number_stays_what_it_is(text: Any) -> None:
    """Metadata may have any keys."""
    assert decode_value({"x": {"$float": text}}) == {"x": {"$float": text}}


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.array(2.0), 2.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(3), 3),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (Color.RED, 3),
        ((1, 2), [1, 2]),
        ([np.float32(1), {"a": torch.tensor(2)}], [1.0, {"a": 2}]),
        (-inf, {"$float": "-inf"}),
        (inf, {"$float": "inf"}),
        (nan, {"$float": "nan"}),
        (torch.tensor(nan), {"$float": "nan"}),
    ],
)
def test_value_is_encoded_as_plain_json(given_value: Any, expected: Any) -> None:
    encoded = encode_metrics({"m": given_value})["m"]
    assert encoded == expected
    assert type(encoded) is type(expected)


@pytest.mark.parametrize(
    ("metrics", "error", "match"),
    [
        ([1], TypeError, "`metrics` must be a dictionary"),
        ({"loss": None}, TypeError, "`loss` must be a number.* got None"),
        ({"loss": b"x"}, TypeError, "`loss` must be a number"),
        ({"loss": 1j}, TypeError, "`loss` must be a number"),
        ({"loss": np.complex64(1j)}, TypeError, "real number"),
        ({"loss": torch.zeros(3)}, TypeError, r"one value.*Tensor of shape \(3,\)"),
        ({"a": {"b": [1, None]}}, TypeError, r"`a.b\[1\]` must be"),
        ({1: 2}, TypeError, "names must be strings"),
        ({"": 2}, ValueError, "non-empty"),
        ({"a": {"$float": "nan"}}, ValueError, "other than"),
        ({"a": 2**63}, ValueError, "64-bit"),
        ({"a": np.uint64(2**64 - 1)}, ValueError, "64-bit"),
    ],
)
def test_other_value_is_refused_with_its_path(
    metrics: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        encode_metrics(metrics)


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (nan, nan, True),
        ([nan, {"a": nan}], [nan, {"a": nan}], True),
        (encode_float(nan), encode_float(nan), True),
        (1, 1.0, True),
        (1, True, False),
        (0.1, 0.1000001, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1], [1, 2], False),
        (inf, -inf, False),
    ],
)
def test_same_value_treats_nan_as_equal(left: Any, right: Any, is_same: bool) -> None:
    assert same_value(left, right) is is_same
