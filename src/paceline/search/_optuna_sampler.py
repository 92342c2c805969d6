"""Optuna's samplers as samplers of a search."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import TrialState, create_trial

from paceline.search._hyperparameter_kinds import Parameter
from paceline.search._hyperparameter_space import Space
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
    """Proposes by a sampler of Optuna, taught by all observations.

    TPE is told of trials that were stopped early by their time and loss, as Optuna's pruned
    trials. The others, which leave pruned trials out, get these as completed ones. Trials without a
    finite loss, that refused their hyperparameters or ran out of memory, count as infinitely bad;
    for TPE and NSGA-II the last ones break a constraint as well. Failed ones count for nothing.

    With several objectives it learns from all of them. Optuna prunes no trials then, so TPE also
    gets stopped trials as completed ones.

    Args:
        of: "tpe", "gp", "cmaes" or "nsgaii".
        seed: The seed of the sampler.
        num_objectives: How many losses a trial has.
        options: Further arguments of Optuna's class.
    """

    def __init__(
        self, of: str = "tpe", seed: int = 0, num_objectives: int = 1, **options: Any
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore")
        self._violation = 0.0
        # Trials run at once: without it, TPE would propose the same place to all of them.
        liar: dict[str, Any] = {"constant_liar": True} if of == "tpe" else {}
        self._of, self._num_objectives = of, num_objectives
        self._options = {"seed": seed} | liar | options
        self._has_begun = False

    def _begin(self, num_known: int, *, is_constrained: bool) -> None:
        # With the same seed a sampler made anew would draw its first points once more.
        seed = self._options["seed"]
        more: dict[str, Any] = {"seed": None if seed is None else (seed + num_known) % 2**32}
        if is_constrained:
            more["constraints_func"] = lambda trial: (self._violation,)
        self._has_begun, self._is_constrained = True, is_constrained
        self._study = optuna.create_study(
            sampler=_KINDS[self._of](**self._options | more),
            directions=["minimize"] * self._num_objectives,
        )
        # By trial: its number in the study while it runs, None once it has ended.
        self._running: dict[str, int | None] = {}
        self._num_ended = 0
        # By number: values that come back as an observation, unless another process has got them.
        self._proposed: dict[int, dict[str, Any]] = {}

    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Generator
    ) -> Sequence[Proposal]:
        """Return proposals after telling Optuna the news."""
        distributions = {each.name: _distribution(each) for each in space.parameters}
        if not self._has_begun:
            self._begin(len(observations), is_constrained=False)
        news = self._news(observations)
        is_broken = any(seen.state == "out_of_memory" for seen, _ in news)
        if is_broken and self._of in _CONSTRAINED and not self._is_constrained:
            # A constraint costs a tenth of an answer, so it comes with the first trial to break it.
            self._begin(len(observations), is_constrained=True)
            news = self._news(observations)
        for seen, known in news:
            self._tell(space, distributions, seen, known)
        for number in self._proposed:
            self._study.tell(number, state=TrialState.FAIL)
        self._proposed.clear()
        return [self._propose(space, distributions) for _ in range(n)]

    def _news(self, observations: Sequence[Observation]) -> Sequence[tuple[Observation, int]]:
        """Return the trials that are new or have ended, with their numbers in the study."""
        known = self._running
        found = ((seen, known.get(seen.id, _NEW)) for seen in observations)
        return [
            (seen, number)
            for seen, number in found
            if number == _NEW or (number is not None and seen.state != "running")
        ]

    def _propose(self, space: Space, distributions: dict[str, BaseDistribution]) -> Proposal:
        number = self._study.ask(distributions).number
        asked = self._study.get_trials(deepcopy=False)[number]
        self._proposed[number] = asked.params
        values = {}
        for each in space.parameters:
            found = asked.params[each.name]
            values[each.path] = each.choices[found] if each.choices else found
        state = {k: v for k, v in asked.system_attrs.items() if "relative_params" not in k}
        return Proposal(
            hparams=space.build(values),
            by=f"optuna {self._of}",
            why=f"knew {self._num_ended} ended and {len(self._running) - self._num_ended} running"
            " trial(s)",
            note=state or None,
        )

    def _tell(
        self,
        space: Space,
        distributions: dict[str, BaseDistribution],
        seen: Observation,
        number: int,
    ) -> None:
        if number == _NEW:
            number = self._number_of(space, distributions, seen)
        if seen.state == "running":
            self._running[seen.id] = number
            return
        self._running[seen.id] = None
        self._num_ended += 1
        self._violation = float(seen.state == "out_of_memory")
        several = self._num_objectives
        losses: Sequence[float] = (math.inf,) * several
        if seen.loss is not None and seen.state not in ("invalid", "out_of_memory"):
            losses = seen.losses or (seen.loss,)
        if seen.state == "failed":
            self._study.tell(number, state=TrialState.FAIL)
        elif (
            seen.state == "stopped"
            and (self._of, several) == ("tpe", 1)
            and math.isfinite(losses[0])
        ):
            trial_id = self._study.get_trials(deepcopy=False)[number]._trial_id
            optuna.Trial(self._study, trial_id).report(losses[0], int(seen.time))
            self._study.tell(number, state=TrialState.PRUNED)
        else:
            self._study.tell(number, losses)

    def _number_of(
        self, space: Space, distributions: dict[str, BaseDistribution], seen: Observation
    ) -> int:
        """Return the number of the trial, running in the study."""
        values = {}
        for each in space.parameters:
            value = each.of(seen.hparams)
            values[each.name] = each.index(value) if each.choices else value
        for number, proposed in self._proposed.items():
            if proposed == values:
                del self._proposed[number]
                return number
        trial = create_trial(
            state=TrialState.RUNNING,
            params=values,
            distributions=distributions,
            system_attrs=dict(seen.note or {}),
        )
        self._study.add_trial(trial)
        return len(self._study.get_trials(deepcopy=False)) - 1


def _distribution(each: Parameter) -> BaseDistribution:
    if each.choices:
        # Indices: Optuna takes no lists and maps as choices.
        return optuna.distributions.CategoricalDistribution(range(len(each.choices)))
    assert each.low is not None
    assert each.high is not None
    if each.kind == "int":
        return optuna.distributions.IntDistribution(int(each.low), int(each.high))
    return optuna.distributions.FloatDistribution(each.low, each.high, log=each.log)
