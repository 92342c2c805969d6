"""Search in this process by ask and tell, without a master and without a train function."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from secrets import randbelow
from typing import Any

import msgspec

from paceline._base.arguments_and_errors import Rng, wrong
from paceline._training.masterless_search_trials import (
    SearchJournal,
    refuse_without_master,
    search_journal,
)
from paceline.config._validate_config import validate_config
from paceline.core._run_opening import local_directory
from paceline.search import _search_messages as messages
from paceline.search._sampler_program import SamplerProgram
from paceline.search._samplers import (
    Ask,
    Sampler,
    answers,
    asking,
    check_installed,
    merged,
    recalled_from,
)
from paceline.search._search import Search

# So many trials may be open at once.
_OPEN = 256


_ENDLESS = {
    "name": "random", "metric": "value", "max_trials": 10**9, "max_concurrent_trials": _OPEN,
}  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False)
class StudyTrial:
    """Trial of a study.

    Attributes:
        number: Its number, from 1.
        hparams: Its hyperparameters.
        seed: A seed of its own.
        by: Who has proposed it, for example "random" or "optuna tpe".
        why: The reason for the proposal, or for a draw at random in its place.
        value: The best value that was told; None before the first finite one. With several
            objectives, that of the first one in `values`.
        values: With several objectives, the values of all at its newest report that no other report
            of it dominates; empty before the first one in which all are finite.
        is_stopped: Whether the method wants no more of it.
        is_over: Whether it has ended.
    """

    number: int
    hparams: dict[str, Any]
    seed: int
    by: str
    why: str
    value: float | None = None
    values: tuple[float, ...] = ()
    is_stopped: bool = False
    is_over: bool = False
    _id: str


class Study:
    """Search by ask and tell: `ask` for a trial, run it anywhere, `tell` its value.

    Args:
        space: Hyperparameters in the words of an experiment config.
        method: The search method in these words, for example ``{"name": "random", "metric":
            "loss", "max_trials": 50}``; by default trials without end, the smallest value wins.
        sampler: "random", "grid", "sobol", "tpe", ``{"name": "optuna", "of": "tpe"}``,
            "module:Class", or a `Sampler`, which is asked in this process. It has priority over
            `method`'s.
        seed: The seed; drawn by default.
        directory: Where all that is asked and told is kept. The same call with the same directory
            continues the study after the end of its process. By default nothing is kept.

    Raises:
        ConfigError: The space, the method or the sampler is not valid; a ValueError.
        ImportError: The package of the sampler is not installed.
        RuntimeError: Another process works on the study in `directory`.
        ValueError: `directory` has another run, or a study with other arguments, or the method
            lets trials wait at rungs.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        *,
        method: Mapping[str, Any] | None = None,
        sampler: str | Mapping[str, Any] | Sampler | None = None,
        seed: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        searcher = dict(method or _ENDLESS)
        if sampler is not None and not isinstance(sampler, Sampler):
            searcher["sampler"] = sampler if isinstance(sampler, str) else dict(sampler)
        config = validate_config(
            {"entrypoint": "study", "searcher": searcher, "hyperparameters": dict(space)}
        )
        self._section, self._space = config.searcher, config.hyperparameters
        refuse_without_master(config.searcher)
        if config.searcher.waits_at_targets:
            raise ValueError(
                "The method of a study must not let trials wait at rungs, as a study cannot pause"
                f" what it does not run, but got {config.searcher.name!r}.\n"
                "Hint: `adaptive_asha` without `promotion` stops trials instead; `train.search`"
                " takes both."
            )
        limits = config.searcher.limits
        if limits is not None and (limits.max_slot_hours, limits.max_wall_time) != (None, None):
            raise ValueError(
                "`limits` of a study must not limit time, as its trials run anywhere.\n"
                "Hint: `max_trials`, `target` and `max_failures` limit a study."
            )
        spec = config.searcher.sampler_spec()
        if spec.name != "random" and not isinstance(sampler, Sampler):
            check_installed(spec, takes_places=True)
        self._journal: SearchJournal | None = None
        self._is_closed = False
        if directory is not None:
            self._journal = search_journal(config, local_directory(directory, "directory"), seed)
            seed = self._journal.seed
        self.seed = randbelow(2**32) if seed is None else seed
        self.trials: list[StudyTrial] = []
        """All trials, in the order of `ask`; those of an earlier process first."""
        self._by_id: dict[str, StudyTrial] = {}
        self._proposals: deque[messages.Proposed] = deque()
        self._search = Search(
            config.search_config(), config.hyperparameters, self.seed, is_asking=True
        )
        self._program: SamplerProgram | None = None
        self._ask: Ask | None = None
        self._name = spec.shown
        if isinstance(sampler, Sampler):
            self._name = type(sampler).__name__
            self._ask = asking(sampler, self._search.space, self.seed)
        elif spec.name != "random":
            self._ask = self._program = SamplerProgram(
                spec, config.hyperparameters, self.seed, os.getcwd()
            )
        self._begin()

    def _begin(self) -> None:
        earlier = [] if self._journal is None else list(self._journal.earlier())
        for record in earlier:
            self._apply(messages.input_from_json(msgspec.json.encode(record.input)))
        if earlier:
            return
        for path in self._section.warm_start_from:
            self._take(recalled_from(str(path), self._search.space, self._section.metric))
        if self._section.limits is not None:
            self._take(self._section.limits.as_input())
        self._take(messages.Started())

    def __enter__(self) -> Study:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._close(error)

    def close(self) -> None:
        """End the process of the sampler, and leave the directory to others."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._program is not None:
            self._program.close()
        if self._journal is not None and not self._is_closed:
            self._is_closed = True
            self._journal.close(error)

    @property
    def best_trial(self) -> StudyTrial | None:
        """The trial with the best value; None before the first finite one.

        Raises:
            RuntimeError: The study has several objectives, and so `best_trials`.
        """
        if self._section.objectives:
            raise RuntimeError(
                "A study must have one objective to have a best trial, but this one has"
                f" {len(self._section.objectives)}.\nHint: `best_trials` is its Pareto front."
            )
        return next(iter(self.best_trials), None)

    @property
    def best_trials(self) -> list[StudyTrial]:
        """The best trial; with several objectives all that no other trial dominates."""
        if self._section.objectives:
            return [self._by_id[request_id] for request_id, _ in self._search.front()]
        sign = 1 if self._section.smaller_is_better else -1
        told = [trial for trial in self.trials if trial.value is not None]
        return sorted(told, key=lambda trial: sign * (trial.value or 0.0))[:1]

    def ask(self) -> StudyTrial | None:
        """Return a new trial.

        It is None if there is none now: the search is over, or waits for values of open trials.
        """
        if not self._search.asks:
            return None
        answer = self._proposed(self._search.asks[0])
        if answer is None:
            points = self._section.points_to_evaluate
            [answer] = answers(self._search, self._ask, self._name, points)
        self._take(answer)
        return self.trials[-1]

    def propose(self, hparams: Mapping[str, Any], *, by: str = "person", why: str = "") -> None:
        """Name hyperparameters for the next `ask`, in the place of the sampler.

        Args:
            hparams: Some of the hyperparameters, or all; the others are drawn.
            by: Who proposes it: a person, a program, a language model.
            why: The reason.

        Raises:
            ValueError: The space does not have such hyperparameters.
        """
        self._search.space.check(merged(self._search.space.sample(Rng(0)), dict(hparams)))
        given = messages.Proposed(request_id="", hparams=dict(hparams), by=by, why=why)
        self._proposals.append(given)

    def _proposed(self, create: messages.Create) -> messages.Proposed | None:
        if not self._proposals:
            return None
        given = self._proposals.popleft()
        hparams = self._search.space.check(merged(create.hparams, given.hparams))
        return messages.Proposed(
            request_id=create.request_id, hparams=hparams, by=given.by, why=given.why
        )

    def state(self) -> dict[str, Any]:
        """Return where the study stands, as JSON for a person or a language model.

        It has the `metric`, whether smaller is better, the `space`, all `trials`, the number of the
        `best` one, and the `rungs` of a method that has any. With several `objectives`, the `front`
        has the numbers of the best ones.
        """
        objectives = [one.model_dump() for one in self._section.objectives]
        front = [trial.number for trial in self.best_trials]
        trials = [asdict(trial) for trial in self.trials]
        for trial in trials:
            del trial["_id"], trial["seed"]
        return {
            "metric": self._section.metric,
            "smaller_is_better": self._section.smaller_is_better,
            "space": self._space,
            "trials": trials,
            "best": front[0] if front and not objectives else None,
            **({"objectives": objectives, "front": front} if objectives else {}),
            "rungs": msgspec.to_builtins(self._search.rungs()),
            "is_over": self._search.is_over,
        }

    def report(self, trial: StudyTrial, value: float | Iterable[float], time: float) -> bool:
        """Tell a value on the way, and return whether the trial is to go on.

        Args:
            trial: The trial.
            value: The searched metric, or the values of all objectives in their order; NaN and
                infinity are the worst values.
            time: How long it has trained, in the unit of the method.

        Raises:
            TypeError: One of them is no number.
            ValueError: There are more or fewer values than objectives.
        """
        first, *others = self._numbers(value)
        time = _number("time", time)
        self._check_open(trial)
        self._take(
            messages.Reported(request_id=trial._id, time=time, metric=first, others=tuple(others))
        )
        return not trial.is_stopped

    def tell(self, trial: StudyTrial, value: float | Iterable[float] | None = None) -> None:
        """End a trial.

        Args:
            trial: The trial.
            value: Its last value, or those of all objectives, after the method's full length; None
                if `report` has said all.

        Raises:
            TypeError: The value is no number.
            ValueError: It has ended before, or there are more or fewer values than objectives.
        """
        if value is not None:
            self.report(trial, value, self._section.length or 1)
        self._end(trial, messages.ExitReason.COMPLETED)

    def fail(self, trial: StudyTrial, *, is_invalid: bool = False) -> None:
        """End a failed trial.

        Args:
            trial: The trial.
            is_invalid: Its hyperparameters cannot work; another takes its place.
        """
        self._end(
            trial, messages.ExitReason.INVALID_HP if is_invalid else messages.ExitReason.ERROR
        )

    def _numbers(self, value: Any) -> list[float]:
        metrics = self._section.metrics
        if len(metrics) == 1:
            return [_number("value", value)]
        needed = f"a number for each of {', '.join(metrics)}"
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError(wrong("value", needed, value))
        values = [_number("value", one) for one in value]
        if len(values) != len(metrics):
            raise ValueError(wrong("value", needed, value))
        return values

    def _end(self, trial: StudyTrial, reason: messages.ExitReason) -> None:
        self._check_open(trial)
        self._take(messages.Exited(request_id=trial._id, reason=reason))

    def _check_open(self, trial: StudyTrial) -> None:
        if trial.is_over:
            raise ValueError(
                f"Trial {trial.number} must be open, but it has ended.\nHint: tell each trial once."
            )

    def _take(self, given: messages.Input) -> None:
        if self._is_closed:
            raise RuntimeError(
                "A study must be open to be asked and told, but `close` has left its directory.\n"
                "Hint: the same call with the same `directory` continues it."
            )
        self._apply(given)
        if self._journal is not None:
            self._journal.add(given)

    def _apply(self, given: messages.Input) -> None:
        for operation in self._search.apply(given):
            if isinstance(operation, messages.Stop):
                self._by_id[operation.request_id].is_stopped = True
            elif isinstance(operation, messages.Create) and isinstance(given, messages.Proposed):
                self._add(operation, given)
        if isinstance(given, messages.Exited):
            self._by_id[given.request_id].is_over = True
        elif isinstance(given, messages.Reported) and self._section.objectives:
            trial = self._by_id[given.request_id]
            trial.values = self._search.values_of(given.request_id)
            trial.value = next(iter(trial.values), None)
        elif isinstance(given, messages.Reported) and math.isfinite(given.metric):
            trial, sign = (
                self._by_id[given.request_id],
                1 if self._section.smaller_is_better else -1,
            )
            if trial.value is None or sign * given.metric < sign * trial.value:
                trial.value = given.metric

    def _add(self, create: messages.Create, proposed: messages.Proposed) -> None:
        trial = StudyTrial(
            number=len(self.trials) + 1,
            hparams=create.hparams,
            seed=create.trial_seed,
            by=proposed.by,
            why=proposed.why,
            _id=create.request_id,
        )
        self.trials.append(trial)
        self._by_id[create.request_id] = trial


def _number(name: str, given: Any) -> float:
    plain = given.item() if hasattr(given, "item") else given
    if type(plain) not in (int, float):
        raise TypeError(wrong(name, "a number", given))
    return float(plain)
