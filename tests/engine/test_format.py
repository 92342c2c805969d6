"""Nested state in files: exact, without pickle."""

import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline._training.engine.checkpoints.sharded_tensor_pieces import HostCopies
from paceline._training.engine.checkpoints.state_format import (
    StateFormatError,
    is_storable,
    load_state,
    save_state,
)
from paceline.data._order_and_random_generators import capture_random_state, restore_random_state


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right) or isinstance(left, dict)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right or (left != left and right != right)


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "on": True}],
        "odd": [float("nan"), float("inf"), -0.0, 2**40, "text", []],
        "half": torch.randn(4).to(torch.bfloat16),
        "empty": torch.empty(0),
        "view": torch.arange(10)[2:5],
    }
    save_state(state, tmp_path, "x")
    assert_same(load_state(tmp_path, "x"), state)


def test_state_can_be_read_as_plain_json(tmp_path: Path) -> None:
    save_state({"version": 1, "position": {"batches": 7}}, tmp_path, "x")
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "version": 1,
        "position": {"batches": 7},
    }


def test_odd_keys_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "$tensor": "text",
        "plain": {"$float": "nan"},
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "empty": {},
        "numbers": {1: "one", "1": "text", None: 0},
    }
    save_state(state, tmp_path, "x")
    assert_same(load_state(tmp_path, "x"), state)


def test_optimizer_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    save_state(dict(model.state_dict()), tmp_path, "model")
    save_state(optimizer.state_dict(), tmp_path, "optimizer")
    step(model, optimizer)
    other = torch.nn.Linear(3, 2)
    again = torch.optim.AdamW(other.parameters(), lr=9.0)
    other.load_state_dict(load_state(tmp_path, "model"))
    again.load_state_dict(load_state(tmp_path, "optimizer"))
    step(other, again)
    assert torch.equal(other.weight, model.weight)


def test_tied_weights_are_stored_once_and_plain_safetensors_reads_them(tmp_path: Path) -> None:

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_state(dict(model.state_dict()), tmp_path, "model")
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {"0.weight", "0.bias", "1.bias"}
    loaded = load_state(tmp_path, "model")
    assert torch.equal(loaded["1.weight"], model[0].weight)


def test_overlapping_tensors_are_stored_apart(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    state = {"tail": whole[4:], "whole": whole, "head": whole[:5], "rest": whole[5:]}
    save_state(state, tmp_path, "x")
    assert_same(load_state(tmp_path, "x"), state)


def test_a_tensor_may_have_the_name_that_the_format_uses_itself(tmp_path: Path) -> None:
    """The file was written, and could never be read."""
    state = {"__metadata__": torch.ones(3), "__metadata__'": torch.zeros(2)}
    save_state(state, tmp_path, "x")
    assert_same(load_state(tmp_path, "x"), state)


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: 0, OrderedDict({(1, 2): 3})])
def test_what_is_not_safe_is_refused_with_its_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(StateFormatError, match="a.b"):
        save_state({"a": {"b": value}}, tmp_path, "x")


def nested(depth: int, value: Any = 0) -> Any:
    for number in range(depth):
        value = (value,) if number % 3 else {"k": value} if number % 2 else [value]
    return value


def holding_itself() -> list[Any]:
    found: list[Any] = [1]
    found += [found, found]
    return found


@pytest.mark.parametrize("value", [nested(250), nested(5000), holding_itself()])
def test_what_is_nested_too_deep_is_refused_with_its_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(StateFormatError, match=r"200 deep at most, but 'a\.b\..*or holds itself"):
        save_state({"a": {"b": value}}, tmp_path, "x")
    assert not is_storable(value)


def test_what_is_nested_deep_comes_back(tmp_path: Path) -> None:
    save_state(nested(200), tmp_path, "x")
    assert load_state(tmp_path, "x") == nested(200)


def test_an_integer_that_json_cannot_hold_is_refused_with_its_path(tmp_path: Path) -> None:
    largest = 10**4300 - 1
    save_state({"a": -largest, largest: 1}, tmp_path, "x")
    assert load_state(tmp_path, "x") == {"a": -largest, largest: 1}
    message = "'a' is an integer of more than 4300 digits"
    with pytest.raises(StateFormatError, match=message):
        save_state({"a": largest + 1}, tmp_path, "x")
    with pytest.raises(StateFormatError, match="'a' has an integer of more than 4300 digits"):
        save_state({"a": {-largest - 1: [1]}}, tmp_path, "x")


ODD_TENSORS = [
    (torch.ones(2, dtype=torch.complex128), "of the type torch.complex128"),
    (torch.ones(2, 2).to_sparse(), "of the layout torch.sparse_coo"),
    (torch.ones(2, device="meta"), "on the meta device"),
]


@pytest.mark.parametrize(("value", "kind"), ODD_TENSORS)
def test_a_tensor_that_cannot_be_stored_is_named(
    tmp_path: Path, value: torch.Tensor, kind: str
) -> None:
    with pytest.raises(StateFormatError, match=rf"'model.odd' is {kind}\. Hint"):
        save_state({"model": {"plain": torch.ones(1), "odd": value}}, tmp_path, "x")
    if value.dtype != torch.complex128:
        # It cannot even be copied.
        with pytest.raises(StateFormatError, match=rf"'x.model.odd' is {kind}\. Hint"):
            HostCopies().copy({"x": {"model": {"plain": torch.ones(1), "odd": value}}})


def test_random_state_survives_the_files(tmp_path: Path) -> None:
    import random

    import numpy

    save_state(capture_random_state(), tmp_path, "rng")
    drawn = random.random(), numpy.random.rand(), torch.rand(1), numpy.random.randn()
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    restore_random_state(load_state(tmp_path, "rng"))
    assert (random.random(), numpy.random.rand(), torch.rand(1), numpy.random.randn()) == drawn


def test_tensors_that_are_sent_from_memory_make_a_file_with_the_same_tensors(
    tmp_path: Path,
) -> None:
    kinds = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64)
    torch.manual_seed(0)
    state: dict[str, Any] = {
        "many": [torch.randn(size) for size in range(300)],
        "kinds": [torch.randn(7).to(kind) for kind in kinds],
        "large": torch.randn(2_500_000),
        "view": torch.randn(1000, 3).t(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(True),
    }
    state["tied"] = state["large"]
    sent = []

    def send(name: str, size: int, pieces: Iterable[memoryview]) -> None:
        found = [bytes(piece) for piece in pieces]
        sent.append((name, [len(each) for each in found]))
        assert sum(map(len, found)) == size
        (tmp_path / name).write_bytes(b"".join(found))

    save_state(state, tmp_path, "part", send)
    [(name, sizes)] = sent
    assert name == "part.safetensors"
    # The many small ones came together.
    assert len(sizes) < 6
    other = tmp_path / "other"
    other.mkdir()
    save_state(state, other, "part")
    assert (tmp_path / "part.json").read_text() == (other / "part.json").read_text()
    found, expected = load_file(tmp_path / name), load_file(other / name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found[key], tensor)))
    # A small file is written, and one with a type that only the library knows.
    save_state({"small": torch.ones(3)}, tmp_path, "small", send)
    save_state([torch.ones(9_000_000).to(torch.float8_e8m0fnu)], tmp_path, "new", send)
    assert len(sent) == 1
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        "part.safetensors", "small.safetensors", "new.safetensors",
    }  # fmt: skip
