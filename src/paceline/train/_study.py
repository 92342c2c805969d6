"""Search in this process by ask and tell, without a master and without a train function."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import randbelow
from typing import Any

from paceline._base.arguments_and_errors import wrong
from paceline._training.masterless_search_trials import refuse_without_master
from paceline.config._validate_config import validate_config
from paceline.search._sampler_program import SamplerProgram
from paceline.search._samplers import Ask, Sampler, answers, asking, check_installed, recalled_from
from paceline.search._search import Search
from paceline.search._search_method import (
    Create,
    Exited,
    ExitReason,
    Input,
    Reported,
    Started,
    Stop,
)


@dataclass(slots=True, kw_only=True, eq=False)
class StudyTrial:
    """Trial of a study.

    Attributes:
        number: Its number, from 1.
        hparams: Its hyperparameters.
        seed: A seed of its own.
        by: Who has proposed it, for example "random" or "optuna tpe".
        why: The reason for the proposal, or for a draw at random in its place.
        value: The best value that was told; None before the first finite one.
        is_stopped: Whether the method wants no more of it.
        is_over: Whether it has ended.
    """

    number: int
    hparams: dict[str, Any]
    seed: int
    by: str
    why: str
    value: float | None = None
    is_stopped: bool = False
    is_over: bool = False
    _id: str


class Study:
    """Search by ask and tell: `ask` for a trial, run it anywhere, `tell` its value.

    Args:
        space: Hyperparameters in the words of an experiment config.
        method: The search method in these words, for example ``{"name": "random", "metric":
            "loss", "max_trials": 50}``; by default trials without end, the smallest value wins.
        sampler: "random", "grid", "sobol", ``{"name": "optuna", "of": "tpe"}``, "module:Class",
            or a `Sampler`, which is asked in this process. It has priority over `method`'s.
        seed: The seed; drawn by default.

    Raises:
        ConfigError: The space, the method or the sampler is not valid; a ValueError.
        ImportError: The package of the sampler is not installed.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        *,
        method: Mapping[str, Any] | None = None,
        sampler: str | Mapping[str, Any] | Sampler | None = None,
        seed: int | None = None,
    ) -> None:
        searcher = dict(method or _ENDLESS)
        if sampler is not None and not isinstance(sampler, Sampler):
            searcher["sampler"] = sampler if isinstance(sampler, str) else dict(sampler)
        config = validate_config(
            {"entrypoint": "study", "searcher": searcher, "hyperparameters": dict(space)}
        )
        self.seed = randbelow(2**32) if seed is None else seed
        self.trials: list[StudyTrial] = []
        """All trials, in the order of `ask`."""
        self._section = config.searcher
        self._search = Search(
            config.search_config(), config.hyperparameters, self.seed, is_asking=True
        )
        self._program: SamplerProgram | None = None
        self._ask: Ask | None = None
        spec = config.searcher.sampler_spec()
        self._name = spec.shown
        if isinstance(sampler, Sampler):
            self._name = type(sampler).__name__
            self._ask = asking(sampler, self._search.space, self.seed)
        elif spec.name != "random":
            check_installed(spec, takes_places=True)
            self._ask = self._program = SamplerProgram(
                spec, config.hyperparameters, self.seed, os.getcwd()
            )
        refuse_without_master(config.searcher)
        for path in config.searcher.warm_start_from:
            self._give(recalled_from(str(path), self._search.space, config.searcher.metric))
        if (limits := config.searcher.limits) is not None:
            if (limits.max_slot_hours, limits.max_wall_time) != (None, None):
                raise ValueError(
                    "`limits` of a study must not limit time, as its trials run anywhere.\n"
                    "Hint: `max_trials`, `target` and `max_failures` limit a study."
                )
            self._give(limits.as_input())
        self._give(Started())

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process of the sampler, if it has one; it starts again when it is asked."""
        if self._program is not None:
            self._program.close()

    @property
    def best_trial(self) -> StudyTrial | None:
        """The trial with the best value; None before the first finite one."""
        sign = 1 if self._section.smaller_is_better else -1
        told = [trial for trial in self.trials if trial.value is not None]
        return min(told, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def ask(self) -> StudyTrial | None:
        """Return a new trial.

        It is None if there is none now: the search is over, or waits for values of open trials.
        """
        if not self._search.asks:
            return None
        points = self._section.points_to_evaluate
        [answer] = answers(self._search, self._ask, self._name, points)
        create, *_ = self._search.apply(answer)
        assert isinstance(create, Create)
        trial = StudyTrial(
            number=len(self.trials) + 1,
            hparams=create.hparams,
            seed=create.trial_seed,
            by=answer.by,
            why=answer.why,
            _id=create.request_id,
        )
        self.trials.append(trial)
        return trial

    def report(self, trial: StudyTrial, value: float, time: float) -> bool:
        """Tell a value on the way, and return whether the trial is to go on.

        Args:
            trial: The trial.
            value: The searched metric; NaN and infinity are the worst values.
            time: How long it has trained, in the unit of the method.

        Raises:
            TypeError: One of them is no number.
        """
        value, time = _number("value", value), _number("time", time)
        self._check_open(trial)
        sign = 1 if self._section.smaller_is_better else -1
        is_better = trial.value is None or sign * value < sign * trial.value
        if math.isfinite(value) and is_better:
            trial.value = value
        self._give(Reported(request_id=trial._id, time=time, metric=value))
        return not trial.is_stopped

    def tell(self, trial: StudyTrial, value: float | None = None) -> None:
        """End a trial.

        Args:
            trial: The trial.
            value: Its last value, after the method's full length; None if `report` has said all.

        Raises:
            TypeError: The value is no number.
            ValueError: It has ended before.
        """
        if value is not None:
            self.report(trial, value, self._section.length or 1)
        self._end(trial, ExitReason.COMPLETED)

    def fail(self, trial: StudyTrial, *, is_invalid: bool = False) -> None:
        """End a trial that has failed.

        Args:
            trial: The trial.
            is_invalid: Its hyperparameters cannot work; another takes its place.
        """
        self._end(trial, ExitReason.INVALID_HP if is_invalid else ExitReason.ERROR)

    def _end(self, trial: StudyTrial, reason: ExitReason) -> None:
        self._check_open(trial)
        trial.is_over = True
        self._give(Exited(request_id=trial._id, reason=reason))

    def _check_open(self, trial: StudyTrial) -> None:
        if trial.is_over:
            raise ValueError(
                f"Trial {trial.number} must be open, but it has ended.\nHint: tell each trial once."
            )

    def _give(self, given: Input) -> None:
        stopped = {one.request_id for one in self._search.apply(given) if isinstance(one, Stop)}
        for trial in self.trials if stopped else ():
            trial.is_stopped = trial.is_stopped or trial._id in stopped


def _number(name: str, given: Any) -> float:
    plain = given.item() if hasattr(given, "item") else given
    if type(plain) not in (int, float):
        raise TypeError(wrong(name, "a number", given))
    return float(plain)


# So many trials may be open at once.
_OPEN = 256
_ENDLESS = {
    "name": "random", "metric": "value", "max_trials": 10**9, "max_concurrent_trials": _OPEN,
}  # fmt: skip
