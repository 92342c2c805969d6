"""A survivor's state is saved only if it is whole, and as it was at the last boundary."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline._training.workers.channels import on_rank_lost
from paceline.core import DistributedPeerError
from paceline.pytorch import _memory_checkpoints
from paceline.pytorch._memory_checkpoints import (
    BoundaryStates,
    Buffers,
    SmallState,
    survivors_problem,
)

PEER_ERROR = RuntimeError("Connection closed by peer")


class Training:
    """A training whose small state is a number, on one of two ranks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position, self.extra = rank, 0, 0

    def small_state(self, buffers: Buffers) -> SmallState:
        counts = {"num_optimizer_steps": self.position, "optimizer_steps": [self.position]}
        own = {"number": torch.tensor(self.rank + 0.5), "extra": bytes(self.extra)}
        return SmallState(own, {"position": self.position, **counts}, [], buffers)

    def captured_at(self, by_rank: Sequence[SmallState]) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = {
            f"rank_{rank}": {**state.own, "buffers": list(state.buffers)}
            for rank, state in enumerate(by_rank)
        }
        return parts, {"steps_completed": by_rank[0].training["position"]}


class Rank:
    """A rank with a model of its own."""

    def __init__(self, rank: int, directory: Path) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.stepper: Any = SimpleNamespace(
            models=[self.model],
            optimizers=[self.optimizer],
            parameters=lambda: [*self.model.parameters()],
            accumulation=SimpleNamespace(is_even=True),
            calls=SimpleNamespace(is_in_batch=True),
            is_divided=False,
            all_reduce=None,
        )
        self.training = Training(rank)
        stepper, training = cast("tuple[Any, Any]", (self.stepper, self.training))
        self.states = BoundaryStates(stepper, training, directory, (rank, 2), 1.0)
        self.stored: list[Mapping[str, Any]] = []

    def train(self) -> None:
        self.model(torch.ones(3, 2) * (self.training.rank + 1)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, *others: "Rank") -> None:
        self.train()
        for other in others:
            # In a process of its own it sees no step of this one.
            other.states._has_stepped = False
        self.training.position += 1
        self.states.note(self.training.position)

    def save(self, error: BaseException = PEER_ERROR, free_bytes: int = 1 << 20) -> bool:
        def store(metadata: Mapping[str, Any], write: Callable[[Path], None]) -> None:
            self.stored.append(metadata)

        return self.states.save(error, store, free_bytes)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return two ranks after three steps."""
    monkeypatch.setattr(_memory_checkpoints, "_MAX_STRIDE", 1)
    both = [Rank(rank, tmp_path / "boundaries") for rank in range(2)]
    for _ in range(3):
        both[0].step()
        both[1].step(both[0])
    yield both
    for rank in both:
        rank.states.close()


def test_a_batch_is_left_only_where_the_state_before_it_is_there(ranks: list[Rank]) -> None:
    first, second = ranks
    assert len(on_rank_lost) == 2
    # The other one has gone, as have its hooks for all modules.
    second.states.close()
    output = first.model(torch.ones(3, 2))
    on_rank_lost[0]()
    for leave in (lambda: first.model(torch.ones(3, 2)), output.sum().backward):
        with pytest.raises(DistributedPeerError, match="one is lost"):
            leave()
    assert first.save()
    # Models in other threads, such as those of data, and those between two batches.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(first.model, torch.ones(3, 2)).result()
    first.stepper.calls.is_in_batch = False
    first.model(torch.ones(3, 2)).sum().backward()
    # The batch goes on after a step: no rank has noted this state.
    first.stepper.calls.is_in_batch = True
    first.optimizer.step()
    first.model(torch.ones(3, 2)).sum().backward()
    first.states._has_stepped = False
    first.states.close()
    first.model(torch.ones(3, 2)).sum().backward()
    assert on_rank_lost == []


def test_one_survivor_saves_the_small_states_of_all(ranks: list[Rank]) -> None:
    first, second = ranks
    first.model(torch.ones(3, 2)).sum().backward()
    states = [first.states.read(rank) for rank in range(2)]
    assert [state.own["number"].item() for state in states if state] == [0.5, 1.5]
    # The forward pass since then has changed the buffers of the first one.
    for rank, state in zip(ranks, states, strict=True):
        assert state is not None
        assert state.buffers[0]["1.num_batches_tracked"] == 3
        mean = rank.model.state_dict()["1.running_mean"]
        assert torch.equal(state.buffers[0]["1.running_mean"], mean) == (rank is second)
    assert first.save()
    assert second.save()
    assert (first.stored, second.stored) == ([{"steps_completed": 3}], [])


def test_a_rank_that_is_ahead_leaves_it_to_the_one_behind(ranks: list[Rank]) -> None:
    ahead, behind = ranks
    ahead.step(behind)
    assert not ahead.save()
    assert behind.save()
    assert behind.stored == [{"steps_completed": 3}]


CHANGES: dict[str, Callable[[Rank], object]] = {
    "an optimizer step": Rank.train,
    "a parameter": lambda rank: nn.init.zeros_(rank.model[0].weight),
    "data of a parameter": lambda rank: rank.model[0].weight.data.mul_(0.5),
    "other data": lambda rank: setattr(rank.model[0].weight, "data", torch.zeros(2, 2)),
    "another parameter": lambda rank: setattr(
        rank.model[0], "weight", nn.Parameter(rank.model[0].weight.detach().clone())
    ),
    "a momentum": lambda rank: rank.optimizer.state[rank.model[0].weight][
        "momentum_buffer"
    ].zero_(),
    "a step of an optimizer that is not known": lambda rank: torch.optim.SGD(
        [nn.Parameter(torch.ones(1))], lr=0.1
    ).step(),
    "a batch without samples for some ranks": lambda rank: setattr(
        rank.stepper.accumulation, "is_even", False
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_state_is_saved_after_a_change_of(ranks: list[Rank], change: str) -> None:
    CHANGES[change](ranks[0])
    assert not ranks[0].save()
    assert not ranks[0].stored


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    for start in (0, len(content) // 2):
        content[start + at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["missing", "empty", "its step", "its data"])
def test_no_state_is_saved_without_that_of_a_rank(
    ranks: list[Rank], tmp_path: Path, what: str
) -> None:
    path = tmp_path / "boundaries" / "1"
    if what == "missing":
        path.unlink()
    elif what == "empty":
        path.write_bytes(b"")
    else:
        damage(path, 0 if what == "its step" else _memory_checkpoints._HEADER.size)
    assert not ranks[0].save()


def test_no_state_is_saved_while_gradients_are_open(ranks: list[Rank]) -> None:
    first, _ = ranks
    first.model(torch.ones(3, 2)).sum().backward()
    first.training.position += 1
    first.states.note(4)
    # The weights are still those of the boundary before.
    assert first.save()
    assert first.stored == [{"steps_completed": 3}]


@pytest.mark.parametrize("error", [ValueError("of the user"), ArithmeticError(), SystemExit()])
def test_no_state_is_saved_after_other_errors(ranks: list[Rank], error: BaseException) -> None:
    assert not ranks[0].save(error)


def test_no_state_is_saved_without_memory(ranks: list[Rank]) -> None:
    assert not ranks[0].save(free_bytes=10)


def test_a_state_that_grows_ends_the_notes(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ranks[0].training.extra = 1 << 20
    ranks[0].step()
    assert "will not save their states: the state of a rank has grown" in caplog.text
    ranks[0].step()
    assert not ranks[0].save()


def test_notes_take_their_share_of_the_time(tmp_path: Path) -> None:
    rank = Rank(0, tmp_path)
    rank.states._share = 1e-12
    for _ in range(3):
        rank.step()
    assert rank.states._stride == _memory_checkpoints._MAX_STRIDE
    rank.states.close()


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (nn.Linear(1, 1), ""),
        (Extra(1, 1), "get_extra_state"),
        (nn.LazyLinear(1), "lazy"),
        (nn.Linear(1, 1, device="meta"), "on the CPU"),
        (nn.BatchNorm1d(3_000_000), "8 MB"),
    ],
)
def test_models_for_which_it_is_not_done(model: nn.Module, problem: str) -> None:
    parameters = [*model.parameters()]
    stepper: Any = SimpleNamespace(
        models=[model], parameters=lambda: parameters, is_divided=False, all_reduce=None
    )
    found = survivors_problem(stepper)
    assert problem in found
    assert bool(found) == bool(problem)


def test_divided_models_are_none_of_survivors(ranks: list[Rank]) -> None:
    assert not survivors_problem(ranks[0].stepper)
    ranks[0].stepper.is_divided = True
    assert "divide" in survivors_problem(ranks[0].stepper)
