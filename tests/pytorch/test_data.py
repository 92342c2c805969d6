"""Batches on their way to a device, and their length."""

import logging
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from paceline import pytorch
from paceline.data._torch_loaders import data_length

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Moving:
    """A batch of the user's own type."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Moving":
        return Moving(self.x.to(device))


class Named(UserDict[str, Any]):
    """A dictionary whose values are attributes as well, as tokenizers return it."""

    def __getattr__(self, name: str) -> Any:
        return self.__dict__[name] if name == "data" else self.data[name]


def test_every_tensor_of_nested_data_is_moved() -> None:
    batch = {
        "x": torch.ones(2),
        "pair": Pair(torch.ones(1), [torch.ones(1), "text"]),
        "own": Moving(torch.ones(1)),
        "array": np.ones(3),
        "scalar": np.float32(1),
        "number": 5,
        "nothing": None,
    }
    moved = pytorch.to_device(batch, META)
    assert isinstance(moved["pair"], Pair)
    for tensor in (
        moved["x"], moved["pair"].x, moved["pair"].y[0], moved["own"].x, moved["array"],
        moved["scalar"],
    ):  # fmt: skip
        assert tensor.device == META
    assert moved["array"].dtype == torch.float64
    assert (moved["pair"].y[1], moved["number"], moved["nothing"]) == ("text", 5, None)
    assert batch["x"].device.type == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Named])
def test_dictionaries_keep_their_type(kind: Any) -> None:
    batch = kind(x=torch.ones(2))
    moved = pytorch.to_device(batch, META)
    assert type(moved) is kind
    assert (moved["x"].device, batch["x"].device.type) == (META, "cpu")
    if kind is Named:
        assert moved.x.device == META


def test_packed_sequences_move_themselves() -> None:
    packed = pytorch.to_device(pack_sequence([torch.ones(3), torch.ones(1)]), META)
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")


def test_types_that_can_leave_the_copy_to_the_device_do() -> None:
    """Else the host would wait for a GPU at each batch, as of a tokenizer's `BatchEncoding`."""

    class Encoding(Moving):
        non_blocking = False

        def to(self, device: torch.device, *, non_blocking: bool = False) -> "Encoding":
            moved = Encoding(self.x.to(device))
            moved.non_blocking = non_blocking
            return moved

    moved = pytorch.to_device([Encoding(torch.ones(1)), Moving(torch.ones(1))], META)
    assert moved[0].non_blocking
    assert [one.x.device for one in moved] == [META, META]


def test_what_cannot_be_moved_is_told_once_per_type(caplog: pytest.LogCaptureFixture) -> None:
    warned: set[type] = set()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pytorch.to_device([object(), np.array(["text"])], torch.device("cpu"), warned)
    assert warned == {object, np.ndarray}
    assert [record.args for record in caplog.records] == [("object",), ("ndarray",)]


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.ones(4, 2), 4),
        (torch.tensor(1.0), 1),
        (np.ones((3, 2)), 3),
        ({"x": torch.ones(5), "y": torch.ones(2)}, 5),
        ({"mask": None, "x": torch.ones(5)}, 5),
        ([torch.ones(6), torch.ones(6)], 6),
        ((None, torch.ones(6)), 6),
        ([{"x": [torch.ones(7)]}], 7),
        (["one", "two", "three"], 3),
        ([1, 2], 2),
        ({"text": ["one", "two"]}, 2),
        (pack_sequence([torch.ones(3), torch.ones(1)]), 2),
        (range(8), 8),
    ],
)
def test_length_is_that_of_the_first_leaf(batch: Any, length: int) -> None:
    assert data_length(batch) == length


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({}, ValueError, "must not be empty, but got an empty dict"),
        ([[]], ValueError, "must not be empty, but got an empty list"),
        (5, TypeError, "type int has no length. Hint: override `get_batch_length`"),
        ({"x": "text"}, TypeError, "type str has no length"),
        ({"x": None}, TypeError, "type NoneType has no length"),
    ],
)
def test_batches_without_a_length_are_refused(
    batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        data_length(batch)
