"""Data of a train function that depend on the rank: refused before anything trains on them."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1))


class Augmented(Dataset[Any]):
    """Samples that differ each time."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] + torch.randn(4)


def data_of(what: str) -> Any:
    rank, size = train.world_rank(), train.world_size()
    if what == "split":
        return random_split(DATA, [16, 8])[1]
    if what == "slice":
        return TensorDataset(X[rank::size], X[rank::size].sum(1))
    if what == "list":
        return [(row, row.sum().item()) for row in X[rank::size]]
    if what == "array":
        return X.numpy()[rank::size]
    if what == "half":
        return TensorDataset(X[: 12 + rank])
    if what == "seeded":
        return random_split(DATA, [16, 8], generator=torch.Generator().manual_seed(0))[1]
    return {"same": DATA, "subset": Subset(DATA, range(8)), "augmented": Augmented()}[what]


def function(config: dict[str, str]) -> int:
    loader = train.prepare_data_loader(DataLoader(data_of("same"), batch_size=2))
    loader = train.prepare_data_loader(DataLoader(data_of(config["what"]), batch_size=2))
    return sum(1 for _ in loader)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Trainer]:
    with train.Trainer(num_workers=3, run_dir=tmp_path_factory.mktemp("runs") / "run") as trainer:
        yield trainer


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


@pytest.mark.parametrize("what", ["split", "slice", "list", "array", "half"])
def test_data_that_depend_on_the_rank_are_refused_by_loader_and_rank(
    workers: train.Trainer, what: str
) -> None:
    said = r"The data of loader 2 must have .* those of rank [12] are others than those of rank 0"
    with pytest.raises(ValueError, match=said):
        workers.run(function, {"what": what})


@pytest.mark.parametrize("what", ["same", "subset", "seeded", "augmented"])
def test_the_same_data_and_what_is_computed_are_no_difference(
    workers: train.Trainer, what: str
) -> None:
    assert len(workers.run(function, {"what": what})) == 3


def test_nothing_is_compared_if_ranks_are_not() -> None:
    with train.Trainer(num_workers=2, check_ranks=False) as trainer:
        assert trainer.run(function, {"what": "slice"}) == [3, 3]
