"""Searches of other libraries, which `make bench-search` runs beside Paceline's."""

from __future__ import annotations

import importlib.util
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from search_tasks import Task

from paceline._base.arguments_and_errors import Rng
from paceline.search import Create, Exited, Input, Operation, Reported, Started, Stop, Train
from paceline.search._hyperparameter_kinds import Parameter
from paceline.search._hyperparameter_space import parse_space


class Rival(ABC):
    """Search of another library in the words of Paceline's simulator."""

    def __init__(self, task: Task, seed: int, slots: int) -> None:
        self.space, self.length, self.seed = parse_space(task.space), task.length, seed
        self._slots, self._num_created = slots, 0
        self._best: dict[str, float] = {}
        self._stopped: set[str] = set()

    asks: tuple[Create, ...] = ()

    @abstractmethod
    def values(self, trial: str) -> dict[str, Any]:
        """Return the values of a new trial by name, of choices their index."""

    def is_stopped(self, trial: str, time: int, loss: float) -> bool:
        """Tell a loss on the way, and return whether the trial stops early."""
        return False

    @abstractmethod
    def end(self, trial: str, loss: float, is_stopped: bool) -> None:
        """Tell the least loss of a trial that has ended."""

    def apply(self, input: Input) -> list[Operation]:
        """Take an input as `Search` does."""
        if isinstance(input, Started):
            return [operation for _ in range(self._slots) for operation in self._create()]
        if isinstance(input, Reported):
            trial, loss, time = input.request_id, input.metric, int(input.time)
            self._best[trial] = min(loss, self._best.get(trial, loss))
            if self.is_stopped(trial, time, loss) and time < self.length:
                self._stopped.add(trial)
                return [Stop(request_id=trial)]
            return []
        assert isinstance(input, Exited)
        trial = input.request_id
        self.end(trial, self._best[trial], trial in self._stopped)
        return self._create()

    def _create(self) -> list[Operation]:
        trial = str(self._num_created)
        self._num_created += 1
        found = self.values(trial)
        values = {
            each.path: each.choices[found[each.name]] if each.choices else found[each.name]
            for each in self.space.parameters
        }
        create = Create(request_id=trial, trial_seed=0, hparams=self.space.build(values))
        return [create, Train(request_id=trial, length=self.length)]

    def drawn(self, rng: Rng) -> dict[str, Any]:
        """Return a draw at random, by name."""
        hparams = self.space.sample(rng)
        return {
            each.name: each.index(each.of(hparams)) if each.choices else each.of(hparams)
            for each in self.space.parameters
        }


class Optuna(Rival):
    """Optuna's TPE with its defaults, alone or with its Hyperband pruner."""

    def __init__(self, task: Task, seed: int, slots: int, *, prunes: bool = False) -> None:
        import optuna

        from paceline.search._optuna_sampler import _distribution

        super().__init__(task, seed, slots)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruner: Any = optuna.pruners.NopPruner()
        if prunes:
            pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=task.length)
        self._study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner
        )
        self._pruned = optuna.trial.TrialState.PRUNED
        self._of = {each.name: _distribution(each) for each in self.space.parameters}
        self._prunes = prunes
        self._trials: dict[str, optuna.Trial] = {}

    def values(self, trial: str) -> dict[str, Any]:
        self._trials[trial] = self._study.ask(self._of)
        return self._trials[trial].params

    def is_stopped(self, trial: str, time: int, loss: float) -> bool:
        if not self._prunes:
            return False
        self._trials[trial].report(loss, time)
        return self._trials[trial].should_prune()

    def end(self, trial: str, loss: float, is_stopped: bool) -> None:
        if is_stopped:
            self._study.tell(self._trials[trial], state=self._pruned)
        else:
            self._study.tell(self._trials[trial], loss)


class Ray(Rival):
    """Ray Tune's ASHA with its defaults, at random."""

    def __init__(self, task: Task, seed: int, slots: int) -> None:
        from ray.tune.schedulers import AsyncHyperBandScheduler

        super().__init__(task, seed, slots)
        self._rng = Rng(seed)
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="time", metric="loss", mode="min", max_t=task.length
        )
        self._trials: dict[str, Any] = {}

    def values(self, trial: str) -> dict[str, Any]:
        self._trials[trial] = SimpleNamespace(trial_id=trial)
        self._scheduler.on_trial_add(None, self._trials[trial])
        return self.drawn(self._rng)

    def is_stopped(self, trial: str, time: int, loss: float) -> bool:
        result = {"time": time, "loss": loss}
        return self._scheduler.on_trial_result(None, self._trials[trial], result) == "STOP"

    def end(self, trial: str, loss: float, is_stopped: bool) -> None:
        result = {"time": 0, "loss": loss}
        self._scheduler.on_trial_complete(None, self._trials[trial], result)


class Smac(Rival):
    """SMAC's facade for hyperparameters, with its defaults: whole trainings, random forests."""

    def __init__(self, task: Task, seed: int, slots: int) -> None:
        import ConfigSpace
        from smac import HyperparameterOptimizationFacade, Scenario

        super().__init__(task, seed, slots)
        space = ConfigSpace.ConfigurationSpace(seed=seed)
        space.add([_config_space_of(each) for each in self.space.parameters])
        self._folder = tempfile.TemporaryDirectory()
        scenario = Scenario(
            space, deterministic=True, n_trials=100, seed=seed, output_directory=self._folder.name
        )
        self._facade = HyperparameterOptimizationFacade(
            scenario, lambda config, seed: 0.0, overwrite=True, logging_level=False
        )
        self._infos: dict[str, Any] = {}

    def values(self, trial: str) -> dict[str, Any]:
        self._infos[trial] = self._facade.ask()
        return dict(self._infos[trial].config)

    def end(self, trial: str, loss: float, is_stopped: bool) -> None:
        from smac.runhistory.dataclasses import TrialValue

        self._facade.tell(self._infos[trial], TrialValue(cost=loss))


def _config_space_of(each: Parameter) -> Any:
    import ConfigSpace

    if each.choices:
        return ConfigSpace.Categorical(each.name, list(range(len(each.choices))))
    assert each.low is not None
    assert each.high is not None
    if each.kind == "int":
        return ConfigSpace.Integer(each.name, (int(each.low), int(each.high)))
    return ConfigSpace.Float(each.name, (each.low, each.high), log=each.log)


def rivals(length: int) -> dict[str, Callable[[Task, int, int], Rival]]:
    """Return the rivals that are installed, by name; only some stop trials early."""
    found: dict[str, Callable[[Task, int, int], Rival]] = {"Optuna TPE": Optuna}
    if importlib.util.find_spec("smac") is not None:
        found["SMAC"] = Smac
    if length > 1:
        found["Optuna Hyperband + TPE"] = lambda *given: Optuna(*given, prunes=True)
        if importlib.util.find_spec("ray") is not None:
            found["Ray Tune ASHA"] = Ray
    return found
