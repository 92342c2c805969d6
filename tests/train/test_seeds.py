"""The order of data by a seed: of the run, of a loader's generator, or of the function."""

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.arange(48.0).reshape(48, 1)
DATA = TensorDataset(X)


def orders(config: dict[str, Any]) -> list[list[float]]:
    """Return the samples of each batch of this worker, over two epochs."""
    if "reproducible" in config:
        train.enable_reproducibility(config["reproducible"])
    if "manual" in config:
        torch.manual_seed(config["manual"] + config.get("by_rank", 0) * train.world_rank())
    generator = None
    if "generator" in config:
        generator = torch.Generator().manual_seed(config["generator"])
    size = 12 // train.world_size()
    plain = DataLoader(DATA, batch_size=size, shuffle=True, generator=generator)
    loader = train.prepare_data_loader(plain)
    return [batch[0].flatten().tolist() for _ in range(2) for batch in loader]


def steps(by_rank: Any) -> list[list[float]]:
    """Return the samples of each step of all workers."""
    return [sorted(sum(parts, [])) for parts in zip(*by_rank, strict=True)]


SEEDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({}, {"seed": 5}),
    "seed wins": ({"manual": 3, "generator": 4}, {"seed": 5}),
    "generator": ({"generator": 4}, {}),
    "generator wins": ({"generator": 4, "manual": 3}, {}),
    "manual": ({"manual": 3}, {}),
    "manual by rank": ({"manual": 3, "by_rank": 1}, {}),
    "reproducible": ({"reproducible": 7}, {}),
}
SAME = [("seed", "seed wins"), ("generator", "generator wins"), ("manual", "manual by rank")]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Return the steps of each case with 0 to 3 workers, twice each."""
    results: dict[tuple[str, int], Any] = {}
    for num_workers in (0, 1, 2, 3):
        directory = tmp_path_factory.mktemp("runs") / "run"
        with train.Trainer(num_workers=num_workers, run_dir=directory) as trainer:
            for name, (config, options) in {**SEEDED, "none": ({}, {})}.items():
                runs = [trainer.run(orders, config, **options) for _ in range(2)]
                results[name, num_workers] = [steps(run) for run in runs]
    return results


@pytest.mark.parametrize("case", SEEDED)
def test_two_runs_and_any_number_of_workers_train_on_the_same_samples_in_each_step(
    found: dict[tuple[str, int], Any], case: str
) -> None:
    expected = found[case, 1][0]
    assert len(expected) == 8
    assert expected[:4] != expected[4:]
    assert sorted(sum(expected[:4], [])) == X.flatten().tolist()
    for num_workers in (0, 1, 2, 3):
        assert found[case, num_workers] == [expected, expected]


@pytest.mark.parametrize(("case", "other"), SAME)
def test_what_comes_first_decides(found: dict[tuple[str, int], Any], case: str, other: str) -> None:
    assert found[case, 3] == found[other, 3]


def test_seeds_differ_and_without_one_each_run_has_an_order_of_its_own(
    found: dict[tuple[str, int], Any],
) -> None:
    first, second = found["none", 2]
    assert first != second
    distinct = {repr(found[case, 2][0]) for case in ("seed", "generator", "manual")}
    assert len(distinct) == 3


@pytest.mark.parametrize("config", [{"manual": 3}, {"generator": 4}, {"reproducible": 7}])
def test_a_function_alone_is_the_same_as_with_one_worker(
    found: dict[tuple[str, int], Any], config: dict[str, Any]
) -> None:
    state = torch.get_rng_state()
    alone = orders(config)
    torch.set_rng_state(state)
    name = next(iter(config))
    assert steps([alone]) == found[name, 1][0]


def resumable(config: dict[str, Any]) -> Any:
    torch.manual_seed(config["manual"])
    model = train.prepare_model(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    plain = DataLoader(DATA, batch_size=4, shuffle=True)
    loader = train.prepare_data_loader(plain)
    seen, first = [], 0
    if state := train.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        seen, first = state["seen"], state["epoch"]
    for epoch in range(first, 3):
        for (x,) in loader:
            optimizer.zero_grad()
            train.backward(model(x / 48).mean())
            optimizer.step()
            seen.append(x.flatten().tolist())
            if len(seen) == config.get("leave_at"):
                train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch, seen=seen)
                return None
    return seen, [p.detach().tolist() for p in model.parameters()]


def test_a_resumed_run_goes_on_with_the_seed_of_its_checkpoint(tmp_path: Path) -> None:
    with train.Trainer(num_workers=2, run_dir=tmp_path / "straight") as trainer:
        straight = trainer.run(resumable, {"manual": 3})
    with train.Trainer(num_workers=2, run_dir=tmp_path / "left") as trainer:
        trainer.run(resumable, {"manual": 3, "leave_at": 8})
        # What the function seeds by now comes after the checkpoint has decided.
        left = trainer.run(resumable, {"manual": 4}, checkpoint=trainer.latest_checkpoint)
    for rank, ((seen, weights), (expected, expected_weights)) in enumerate(
        zip(left, straight, strict=True)
    ):
        assert weights == expected_weights
        # The first batches are those of the chief, who has stored them.
        assert seen[8 * rank :] == expected[8 * rank :]


def test_a_seed_must_be_an_integer() -> None:
    with pytest.raises(TypeError, match="`seed` must be an integer"):
        train.Trainer(num_workers=0, seed="x")  # type: ignore[arg-type]
