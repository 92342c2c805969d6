"""Optuna's samplers as samplers of a search."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import TrialState, create_trial

from paceline.search._hyperparameter_space import Parameter, Space
from paceline.search._samplers import Observation, Proposal, Sampler

if TYPE_CHECKING:
    from numpy.random import Generator
    from optuna.distributions import BaseDistribution

_KINDS: dict[str, Any] = {
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
    "nsgaii": optuna.samplers.NSGAIISampler,
}
_NEW = -1
# They keep away from where a constraint was broken: a trial that ran out of memory breaks one.
_CONSTRAINED = ("tpe", "nsgaii")


class OptunaSampler(Sampler):
    """Proposes by one of Optuna's samplers, which learns from all observations.

    TPE is told of trials that were stopped early by their time and loss, as Optuna's pruned
    trials. The others, which leave pruned trials out, get these as completed ones. Trials without a
    finite loss, that refused their hyperparameters or ran out of memory, count as infinitely bad;
    for TPE and NSGA-II the last ones break a constraint as well. Failed ones count for nothing.

    Args:
        of: "tpe", "gp", "cmaes" or "nsgaii".
        seed: The seed of the sampler.
        options: Further arguments of Optuna's class.
    """

    def __init__(self, of: str = "tpe", seed: int = 0, **options: Any) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore")
        # Trials run at once: without it, TPE would propose the same place to all of them.
        liar: dict[str, Any] = {"constant_liar": True} if of == "tpe" else {}
        self._of = of
        if of in _CONSTRAINED:
            # Read from the trials that are added; Optuna asks it of those that it runs itself.
            liar |= {"constraints_func": lambda trial: (0.0,)}
        self._study = optuna.create_study(sampler=_KINDS[of](**{"seed": seed} | liar | options))
        # By trial: the number of its stand-in while it runs, None once it has ended.
        self._running: dict[str, int | None] = {}
        # Stand-ins for proposals that come back as observations, maybe to another process.
        self._proposed: list[int] = []

    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Generator
    ) -> Sequence[Proposal]:
        """Return proposals after telling Optuna what is new."""
        distributions = {each.name: _distribution(each) for each in space.parameters}
        for number in self._proposed:
            self._drop(number)
        self._proposed.clear()
        for seen in observations:
            self._tell(space, distributions, seen)
        return [self._propose(space, distributions) for _ in range(n)]

    def _propose(self, space: Space, distributions: dict[str, BaseDistribution]) -> Proposal:
        frozen = self._study.tell(self._study.ask(distributions), state=TrialState.FAIL)
        trial = create_trial(
            state=TrialState.RUNNING, params=frozen.params, distributions=distributions
        )
        self._proposed.append(self._add(trial))
        values = {}
        for each in space.parameters:
            found = frozen.params[each.name]
            values[each.path] = each.choices[found] if each.choices else found
        num_ended = sum(number is None for number in self._running.values())
        state = {k: v for k, v in frozen.system_attrs.items() if "relative_params" not in k}
        return Proposal(
            hparams=space.build(values),
            by=f"optuna {self._of}",
            why=f"knew {num_ended} ended and {len(self._running) - num_ended} running trial(s)",
            note=state or None,
        )

    def _tell(
        self, space: Space, distributions: dict[str, BaseDistribution], seen: Observation
    ) -> None:
        is_running = seen.state == "running"
        known = self._running.get(seen.id, _NEW)
        if known is None or (is_running and known != _NEW):
            return
        if known != _NEW:
            self._drop(known)
        values = {}
        for each in space.parameters:
            value = each.of(seen.hparams)
            values[each.name] = each.index(value) if each.choices else value
        outcome: dict[str, Any] = {"state": TrialState.RUNNING}
        if seen.state == "failed":
            outcome = {"state": TrialState.FAIL}
        elif not is_running:
            outcome = self._outcome(seen)
        noted = dict(seen.note or {})
        if self._of in _CONSTRAINED and not is_running:
            noted["constraints"] = [float(seen.state == "out_of_memory")]
        trial = create_trial(
            params=values, distributions=distributions, system_attrs=noted, **outcome
        )
        number = self._add(trial)
        self._running[seen.id] = number if is_running else None

    def _outcome(self, seen: Observation) -> dict[str, Any]:
        is_bad = seen.loss is None or seen.state in ("invalid", "out_of_memory")
        loss = math.inf if is_bad else seen.loss
        if seen.state == "stopped" and self._of == "tpe" and not is_bad:
            return {"state": TrialState.PRUNED, "intermediate_values": {int(seen.time): loss}}
        return {"state": TrialState.COMPLETE, "value": loss}

    def _add(self, trial: optuna.trial.FrozenTrial) -> int:
        self._study.add_trial(trial)
        return len(self._study.get_trials(deepcopy=False)) - 1

    def _drop(self, number: int) -> None:
        self._study.tell(number, state=TrialState.FAIL)


def _distribution(each: Parameter) -> BaseDistribution:
    if each.choices:
        # Indices: Optuna takes no lists and maps as choices.
        return optuna.distributions.CategoricalDistribution(range(len(each.choices)))
    assert each.low is not None
    assert each.high is not None
    if each.kind == "int":
        return optuna.distributions.IntDistribution(int(each.low), int(each.high))
    return optuna.distributions.FloatDistribution(each.low, each.high, log=each.log)
