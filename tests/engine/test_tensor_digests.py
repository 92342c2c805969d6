"""Digests of tensors: each bit counts, whatever the type, by turns where tensors are large."""

import pytest
import torch

from paceline._training.engine.tensor_copies_and_digests import BlockSums, TensorDigests

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


def digest(tensor: torch.Tensor, turn: int | None = None) -> str:
    digests = TensorDigests(turn)
    digests.add("x", tensor)
    return digests.finish()["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_change_of_one_value_changes_the_digest(dtype: torch.dtype) -> None:
    before = torch.ones(7, 3, dtype=dtype)
    after = before.clone()
    after[5, 1] = 0
    assert digest(before) == digest(before.clone())
    assert digest(before) != digest(after)


def test_values_that_are_not_finite_and_zeros_count_by_their_bits() -> None:
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_another_type_or_shape_is_another_digest() -> None:
    assert digest(torch.zeros(4)) != digest(torch.zeros(2, 2))
    assert digest(torch.zeros(4)) != digest(torch.zeros(4, dtype=torch.int32))


def test_a_transposed_tensor_counts_as_what_it_shows() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest(matrix.t()) == digest(matrix.t().contiguous())


def test_what_has_no_values_has_a_digest() -> None:
    assert digest(torch.nn.LazyLinear(2).weight)
    assert digest(torch.zeros(2, device="meta"))
    assert digest(torch.zeros(0))


def test_each_block_of_a_large_tensor_has_its_turn() -> None:
    before = torch.zeros(6 << 12)
    after = before.clone()
    after[-1] = 1
    found = [digest(before, turn) != digest(after, turn) for turn in range(6)]
    assert found == [False, False, False, False, False, True]
    assert digest(before) != digest(after)


def sums_of(*tensors: torch.Tensor) -> dict[str, list[int]]:
    sums = BlockSums(torch.device("cpu"))
    for index, tensor in enumerate(tensors):
        sums.add(str(index), tensor.view(torch.int32).split(1 << 16))
    return sums.finish()


def test_sums_on_a_device_tell_blocks_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3 << 16, generator=generator)
    second = torch.randn(5, generator=generator)
    found = sums_of(first, second)
    assert len(found["0"]) == 3
    assert sums_of(second)["0"] == found["1"]
    for changed in (first.clone(), first.clone()):
        # Two changes of signs would cancel out in a plain sum.
        changed[[1, 5]] *= -1
        assert sums_of(changed)["0"] != found["0"]
    swapped = first.clone()
    swapped[[0, 1]] = first[[1, 0]]
    assert sums_of(swapped)["0"] != found["0"]


def test_sums_of_more_words_than_fit_at_once_are_the_same() -> None:
    large = torch.ones(5 << 20)
    found = sums_of(large, torch.ones(3))
    assert found["0"] == [found["0"][0]] * 80
    assert found["1"] == sums_of(torch.ones(3))["0"]
