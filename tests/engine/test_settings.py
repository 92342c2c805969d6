"""Settings that were changed are applied to a stored state, and nothing else is."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, Optimizer, RMSprop, lr_scheduler

from paceline._training.engine.checkpoints.resume_differences import SettingChanges, built_settings
from paceline._training.engine.lr_schedulers import scheduler_state

MakeScheduler = Callable[[Optimizer], Any]
KINDS: dict[str, MakeScheduler] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, epoch / 3)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, o.param_groups[0]["lr"] * 2, total_steps=20),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


class Training:
    """An optimizer of two groups and a scheduler, which go some steps."""

    def __init__(self, make: MakeScheduler, kind: Any = SGD, **options: Any) -> None:
        self.weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": [weight]} for weight in self.weights]
        self.optimizer = kind(groups, **{"lr": 0.1, **options})
        self.scheduler = make(self.optimizer)
        self.built = built_settings([], [self.optimizer], [self.scheduler])

    def go(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for weight in self.weights:
                weight.grad = torch.ones(2)
            self.optimizer.step()
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(1.0) if is_plateau else self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler_state(self.scheduler),
            "built": self.built,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.changes = SettingChanges(state["built"], self.built)
        self.optimizer.load_state_dict(self.changes.in_optimizer(state["optimizer"], 0))
        self.changes.load_scheduler(self.scheduler, state["scheduler"], 0)

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[Training], str]:
    def told(training: Training) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            training.changes.tell()
        return caplog.text

    return told


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_without_a_change_the_state_is_that_of_before(
    make: MakeScheduler, num_steps: int, told: Callable[[Training], str]
) -> None:
    first, second = Training(make, Adam), Training(make, Adam)
    first.go(num_steps)
    stored = first.state()
    second.load(stored)
    assert second.changes.in_optimizer(stored["optimizer"], 0) == stored["optimizer"]
    assert scheduler_state(second.scheduler) == stored["scheduler"]
    assert told(second) == ""
    for training in (first, second):
        training.go(6)
    assert second.rates == first.rates


@pytest.mark.parametrize(
    "name", ["step", "milestones", "function", "cosine", "one cycle", "warm-up", "plateau"]
)
def test_another_learning_rate_is_that_of_a_training_that_had_it_from_the_start(
    name: str, told: Callable[[Training], str]
) -> None:
    first, second, straight = (Training(KINDS[name], lr=lr) for lr in (0.1, 0.3, 0.3))
    first.go(4)
    second.load(first.state())
    straight.go(4)
    assert second.rates == pytest.approx(straight.rates)
    for _ in range(6):
        for training in (second, straight):
            training.go(1)
        assert second.rates == pytest.approx(straight.rates)
    text = told(second)
    assert "resumes with other settings than those of the checkpoint" in text
    # Both groups have it, and it is named once.
    assert text.count("lr was") - text.count("max_lr was") - text.count("min_lr was") == 1


def test_changes_of_optimizer_and_scheduler_are_applied_and_named(
    told: Callable[[Training], str],
) -> None:
    first = Training(KINDS["milestones"], momentum=0.9, weight_decay=0.0)
    second = Training(
        lambda o: lr_scheduler.MultiStepLR(o, [2, 6], gamma=0.1), momentum=0.5, weight_decay=0.01
    )
    first.go(3)
    second.load(first.state())
    # One milestone has passed, with the new factor.
    assert second.rates == pytest.approx([0.01, 0.01])
    # What was learned is kept: 1 + 0.9 + 0.81.
    for state in second.optimizer.state.values():
        assert state["momentum_buffer"].tolist() == pytest.approx([2.71, 2.71])
    second.go(2)
    assert second.rates == pytest.approx([0.01, 0.01])
    second.go(1)
    assert second.rates == pytest.approx([0.001, 0.001])
    assert {group["momentum"] for group in second.optimizer.param_groups} == {0.5}
    text = told(second)
    for change in (
        "optimizer 0: momentum was 0.9 and is 0.5",
        "optimizer 0: weight_decay was 0.0 and is 0.01",
        "scheduler 0: gamma was 0.5 and is 0.1",
        "scheduler 0: milestones was {2: 1, 5: 1} and is {2: 1, 6: 1}",
    ):
        assert text.count(change) == 1


def test_a_learning_rate_may_be_a_tensor(told: Callable[[Training], str]) -> None:
    first, same, other = (
        Training(KINDS["step"], Adam, lr=torch.tensor(lr)) for lr in (0.5, 0.5, 1.0)
    )
    first.go(2)
    assert [float(rate) for rate in first.rates] == [0.25, 0.25]
    same.load(first.state())
    assert [float(rate) for rate in same.rates] == [0.25, 0.25]
    assert told(same) == ""
    other.load(first.state())
    assert [float(rate) for rate in other.rates] == [0.5, 0.5]
    assert "optimizer 0: lr was 0.5 and is 1.0" in told(other)


FORMULAS: dict[str, tuple[MakeScheduler, MakeScheduler]] = {
    "constant": (
        lambda o: lr_scheduler.ConstantLR(o, 0.1, total_iters=2),
        lambda o: lr_scheduler.ConstantLR(o, 0.1, total_iters=9),
    ),
    "constant factor": (
        lambda o: lr_scheduler.ConstantLR(o, 0.1, total_iters=6),
        lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=6),
    ),
    "linear": (
        lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=2),
        lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=9),
    ),
    "step": (
        lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: lr_scheduler.StepLR(o, 3, gamma=0.9),
    ),
    "exponential": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ),
    "cosine": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 30, eta_min=0.01),
    ),
    "warm-up": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 20)], [2]
        ),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 40)], [2]
        ),
    ),
}


@pytest.mark.parametrize("makers", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_other_options_of_a_scheduler_are_those_of_a_training_that_had_them_from_the_start(
    makers: tuple[MakeScheduler, MakeScheduler], kind: Any
) -> None:
    before, after = makers
    first, second, straight = (
        Training(make, Adam, lr=kind(0.125)) for make in (before, after, after)
    )
    first.go(4)
    second.load(first.state())
    straight.go(4)
    for _ in range(8):
        assert [*map(float, second.rates)] == pytest.approx([*map(float, straight.rates)])
        for training in (second, straight):
            training.go(1)


def test_what_training_has_changed_by_itself_stays(told: Callable[[Training], str]) -> None:
    first, second = Training(KINDS["step"]), Training(KINDS["step"])
    for group in first.optimizer.param_groups:
        group["weight_decay"] = 0.5
        group["lr"] = 0.7
    first.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2})
    second.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    second.load(first.state())
    assert second.rates == [0.7, 0.7, 0.2]
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert told(second) == ""


@pytest.mark.parametrize(
    ("kind", "then", "now", "is_refused"),
    [
        (Adam, {}, {"amsgrad": True}, True),
        (Adam, {"amsgrad": True}, {}, False),
        (RMSprop, {}, {"centered": True}, True),
        (RMSprop, {}, {"momentum": 0.5}, True),
        (RMSprop, {"momentum": 0.5}, {"momentum": 0.9}, False),
        (SGD, {}, {"momentum": 0.5}, False),
    ],
)
def test_an_option_whose_state_is_not_stored_is_refused_by_name(
    kind: Any, then: Any, now: Any, is_refused: bool
) -> None:
    first, second = Training(KINDS["step"], kind, **then), Training(KINDS["step"], kind, **now)
    first.go(2)
    if is_refused:
        [option] = now
        with pytest.raises(ValueError, match=f"'{option}' of optimizer 0 must stay"):
            second.load(first.state())
        return
    second.load(first.state())
    second.go(2)


@pytest.mark.parametrize(
    ("then", "now", "is_changed"),
    [
        (np.arange(3), np.arange(3), False),
        (np.arange(3), np.ones(3), True),
        (float("nan"), float("nan"), False),
        (torch.ones(2), None, True),
        (None, torch.ones(2), True),
        (torch.ones(2), torch.ones(2), False),
    ],
)
def test_options_of_a_users_own_may_be_anything(
    then: Any, now: Any, is_changed: bool, told: Callable[[Training], str]
) -> None:
    first, second = Training(KINDS["step"]), Training(KINDS["step"])
    for training, value in ((first, then), (second, now)):
        training.optimizer.param_groups[0]["own"] = value
        training.built = built_settings([], [training.optimizer], [training.scheduler])
    second.load(first.state())
    assert ("optimizer 0: own was" in told(second)) == is_changed


def test_a_checkpoint_without_settings_is_taken_as_it_is(told: Callable[[Training], str]) -> None:
    first, second = Training(KINDS["step"]), Training(KINDS["step"], lr=0.5)
    first.go(2)
    second.load({**first.state(), "built": None})
    assert second.rates == first.rates
    assert told(second) == ""


def test_layers_that_are_built_frozen_or_trained_are_applied_to_those_of_the_checkpoint(
    told: Callable[[Training], str],
) -> None:
    training = Training(KINDS["step"])
    then = {"frozen": [["a", "b", "c"]]}
    changes = training.changes = SettingChanges(then, {"frozen": [["b", "d"]]})
    # Training has thawed b and frozen e.
    assert changes.in_frozen(["a", "c", "e"], 0) == {"d", "e"}
    text = told(training)
    assert "'a' of model 0, 'c' of model 0 was frozen and is trained" in text
    assert "'d' of model 0 was trained and is frozen" in text
    assert "'b'" not in text
    assert SettingChanges(None, {"frozen": [["a"]]}).in_frozen(["b"], 0) == {"b"}
