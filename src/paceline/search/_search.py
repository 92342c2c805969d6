"""Search around a method: inputs, operations, snapshots and replay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec

from paceline._base.arguments_and_errors import Rng
from paceline.search import _search_messages as messages
from paceline.search import _search_method as base
from paceline.search._hyperparameter_space import Space, parse_space
from paceline.search._rungs import newer_point, pareto_front
from paceline.search._samplers import Observation
from paceline.search._search_state import Budget, Observations, SearchedTrial, check_method_state

_VERSION = 1


class Search:
    """Search: turns events of trials into operations for the next steps.

    A search does no I/O and knows no clock: the same configuration, seed and inputs give the same
    operations. It is not thread-safe.

    With `is_asking` the hyperparameters of each trial are an input as well, `Proposed`: until it
    comes, all operations on the trial wait.

    Attributes:
        max_invalid_in_a_row: How many trials in a row may refuse their hyperparameters before
            whoever runs a search ends it: it replaces each of them, and would do so for ever.
    """

    max_invalid_in_a_row: ClassVar[int] = 100

    def __init__(
        self,
        config: base.SearchConfig,
        hyperparameters: dict[str, Any],
        seed: int,
        *,
        is_asking: bool = False,
    ) -> None:
        """Set the search up; the first trials come with the `Started` input.

        Raises:
            SpaceError: If the hyperparameters are not valid, or lack counts for a grid.
            ValueError: If the seed is not valid.
            SearchMethodError: If the method cannot be made.
        """
        self._set_up(config, parse_space(hyperparameters), Rng(seed))
        self._is_asking = is_asking

    def apply(self, input: messages.Input) -> list[messages.Operation]:
        """Process an input and return the resulting operations.

        A second exit of a trial, its reports and progress after its stop or exit, and reports at a
        time that is not finite change nothing.

        Raises:
            ValueError: If the search has not started, is started twice or knows no such trial, if
                a report lacks an objective, or if its method cannot create as many trials as a
                limit has.
            SpaceError: If proposed hyperparameters are not in the space.
            TypeError: If the input is of no such kind.
            SearchMethodError: If the method fails; the search must not be used any more then.
        """
        if isinstance(input, messages.Started):
            operations = self._start()
        elif isinstance(input, messages.Reported):
            operations = self._report(input)
        elif isinstance(input, messages.Progressed):
            operations = self._note_progress(input)
        elif isinstance(input, messages.Exited):
            operations = self._exit(input)
        elif isinstance(input, messages.Proposed):
            operations = self._propose(input)
        elif isinstance(input, messages.Limited):
            operations = self._limit(input)
        elif isinstance(input, messages.Spent):
            operations = self._spend(input)
        elif isinstance(input, messages.Recalled):
            operations = self._recall(input)
        else:
            raise TypeError(
                "`input` must be one of the inputs of `paceline.search`, but got"
                f" {type(input).__name__}.\n"
                "Hint: decode stored inputs with `input_from_json`."
            )
        return operations

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics of a complete report: the metric of each objective."""
        return self._config.metrics

    @property
    def is_over(self) -> bool:
        """Return whether the search has shut down: all its trials have ended."""
        return self._is_over

    def progress(self) -> float:
        """Return the progress from 0 to 1: the mean over all present and future trials.

        A trial that ended counts as 1, one that trains by its progress, one that is still to be
        created as 0.
        """
        if self._is_over:
            return 1.0
        closed = sum(self._num_exited.values()) - self._num_exited[messages.ExitReason.INVALID_HP]
        # An exact sum does not depend on the order in which trials reported.
        done = closed + math.fsum(self._open_progress.values())
        return min(done / max(self.num_trials(), 1), 1.0)

    def num_trials(self) -> int:
        """Return how many trials the search has and will create, as far as is known."""
        with self._guard("num_trials"):
            number = self._method.num_trials(self._num_exited[messages.ExitReason.INVALID_HP])
        most = self.budget.limits.max_trials
        is_least = most is None or number <= most
        return number if is_least else max(most or 0, self.budget.num_trials)

    def trials(self) -> tuple[base.TrialView, ...]:
        """Return a view of all trials in the order of their creation."""
        return tuple(
            base.TrialView(
                request_id=request_id,
                is_stopped=trial.is_stopped,
                exit_reason=trial.exit_reason,
                progress=trial.progress if trial.exit_reason is None else 1.0,
            )
            for request_id, trial in self._trials.items()
        )

    def rungs(self) -> tuple[base.BracketView, ...]:
        """Return a view of the brackets and their rungs; only halving searches have any."""
        with self._guard("brackets"):
            return self._method.brackets()

    def points(self) -> list[tuple[str, tuple[float, ...]]]:
        """Return the losses of each trial of a search of several objectives; see `newer_point`.

        Trials that have never reported finite ones have none.
        """
        return [
            (request_id, trial.point)
            for request_id, trial in self._trials.items()
            if trial.point and trial.exit_reason is not messages.ExitReason.INVALID_HP
        ]

    def front(self) -> list[tuple[str, tuple[float, ...]]]:
        """Return the Pareto front: trials with the values of all objectives."""
        return [(key, self._config.signed(losses)) for key, losses in pareto_front(self.points())]

    def values_of(self, request_id: str) -> tuple[float, ...]:
        """Return the values of all objectives for a trial; empty without any."""
        point = self._find(request_id).point
        return self._config.signed(point) if point else ()

    @property
    def asks(self) -> tuple[messages.Create, ...]:
        """Return the trials without hyperparameters so far; each has a draw at random."""
        return tuple(create for create, _ in self._asks.values())

    @property
    def num_asks(self) -> int:
        """Return how many trials wait for their hyperparameters."""
        return len(self._asks)

    def first_ask(self) -> messages.Create:
        """Return the trial with the longest wait; some trial must wait."""
        return next(iter(self._asks.values()))[0]

    def ask_of(self, request_id: str) -> messages.Create | None:
        """Return a waiting trial by its request id; None if the trial does not wait."""
        found = self._asks.get(request_id)
        return None if found is None else found[0]

    def observations(self) -> list[Observation]:
        """Return the observations for samplers: earlier trials, then answered trials, in order."""
        return self._observations.all()

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON-able data.

        Raises:
            SearchMethodError: If the method fails, or its state is no JSON.
        """
        with self._guard("snapshot"):
            state = self._method.snapshot()
            check_method_state(state)
        asking = {
            "asks": msgspec.to_builtins(list(self._asks.values())),
            **self._observations.snapshot(),
        }
        return {
            "version": _VERSION,
            **(asking if self._is_asking else {}),
            "kind": self._config.kind,
            "is_started": self._is_started,
            "is_over": self._is_over,
            "rng": self._rng.snapshot(),
            "trials": [
                [
                    *(key, t.is_stopped, t.exit_reason and t.exit_reason.value),
                    *(t.progress, t.reached, t.is_cut, t.is_out_of_memory),
                    *([list(t.point)] if self._config.objectives else ()),
                ]
                for key, t in self._trials.items()
            ],
            "budget": msgspec.to_builtins(self.budget),
            "held": msgspec.to_builtins(list(self._held.values())),
            "method": state,
        }

    @classmethod
    def restore(
        cls, config: base.SearchConfig, hyperparameters: dict[str, Any], snapshot: dict[str, Any]
    ) -> Search:
        """Return a search continuing at the state of `snapshot`.

        Raises:
            ValueError: If the snapshot has another version or comes from another configuration.
            SpaceError: If the hyperparameters are not valid.
            SearchMethodError: If the method cannot be made, or does not take its state back.
        """
        version = snapshot.get("version")
        if version != _VERSION:
            raise ValueError(
                f"A search's snapshot must have version {_VERSION}, but got {version!r}.\n"
                "Hint: continue the search with the Paceline release that wrote the snapshot."
            )
        base.check_same_setup("kind", config.kind, snapshot["kind"])
        search = cls.__new__(cls)
        search._set_up(config, parse_space(hyperparameters), Rng.from_snapshot(snapshot["rng"]))
        search._load(snapshot)
        return search

    def _set_up(self, config: base.SearchConfig, space: Space, rng: Rng) -> None:
        # A class that lacks the name is first noticed here.
        if not isinstance(getattr(config, "kind", None), str):
            raise base.SearchMethodError(
                f"`{type(config).__name__}.kind` must be the name of the search method.\n"
                'Hint: write `kind: ClassVar[str] = "name"` in the class.'
            )
        self._config = config
        self._rng = rng
        self.space = space
        self._is_asking = False
        self._asks: dict[str, tuple[messages.Create, list[messages.Operation]]] = {}
        self.budget = Budget()
        # By trial: operations that create it once the limits have room for it.
        self._held: dict[str, list[messages.Operation]] = {}
        with self._guard("make_method"):
            self._method = config.make_method(base.TrialMaker(space, rng))
        with self._guard("num_trials"):
            self._num_planned = self._method.num_trials(0)
        self._is_started = False
        self._is_over = False
        self._trials: dict[str, SearchedTrial] = {}
        self._observations = Observations(self._trials)
        self._num_exited = dict.fromkeys(messages.ExitReason, 0)
        # Running trials only: the cost of the progress stays independent of the ended trials.
        self._open_progress: dict[str, float] = {}

    def _load(self, snapshot: dict[str, Any]) -> None:
        self._is_started = snapshot["is_started"]
        self._is_over = snapshot["is_over"]
        # Snapshots of earlier versions lack the last ones.
        for request_id, is_stopped, reason, progress, *later in snapshot["trials"]:
            exit_reason = None if reason is None else messages.ExitReason(reason)
            trial = SearchedTrial(is_stopped, exit_reason, float(progress), *later)
            trial.point = tuple(trial.point)
            self._trials[request_id] = trial
            if exit_reason is None:
                self._open_progress[request_id] = float(progress)
            else:
                self._num_exited[exit_reason] += 1
        self.budget = msgspec.convert(snapshot.get("budget", self._counted()), Budget)
        for held in snapshot.get("held", ()):
            operations = msgspec.convert(held, list[messages.Operation])
            self._held[operations[0].request_id] = operations  # type: ignore[union-attr]
        self._is_asking = "asks" in snapshot
        for stored in snapshot.get("asks", ()):
            create, later = msgspec.convert(
                stored, tuple[messages.Create, list[messages.Operation]]
            )
            self._asks[create.request_id] = create, later
        self._observations.load(snapshot)
        with base.method_errors(self._config.kind, "load", expected=ValueError):
            self._method.load(snapshot["method"])

    def _guard(self, part: str) -> AbstractContextManager[None]:
        return base.method_errors(self._config.kind, part)

    def _start(self) -> list[messages.Operation]:
        if self._is_started:
            raise ValueError(
                "`Started` must be given once, but the search has already started.\n"
                "Hint: after a restart, restore the snapshot and continue with the next input."
            )
        self._is_started = True
        most, operations = self.budget.limits.max_trials, []
        if most is not None and most < self._num_planned:
            operations = self._resize(most)
        with self._guard("start"):
            operations = operations + self._take_operations(self._method.start())
            if not self._trials and not self._held:
                raise ValueError(
                    "it must create at least one trial, as nothing ever ends otherwise"
                )
        return operations

    def _report(self, report: messages.Reported) -> list[messages.Operation]:
        trial = self._find(report.request_id)
        if trial.is_stopped or trial.exit_reason is not None:
            return []
        time, metric = float(report.time), float(report.metric)
        if not math.isfinite(time):
            return []
        is_one = not self._config.objectives
        losses: tuple[float, ...] = ()
        loss = metric if self._config.smaller_is_better else -metric
        if not is_one:
            losses = self._losses(report)
            trial.point = newer_point(trial.point, losses)
            loss = trial.point[0] if trial.point else math.nan
        self._observations.note_report(report.request_id, time, loss, is_best=not is_one)
        with self._guard("trained_share"):
            share = min(self._method.trained_share(time), 1.0)
        if share > trial.reached:
            trial.reached = share
            self._set_progress(report.request_id, trial, trial.progress)
        self._note_best(metric)
        with self._guard("reported"):
            if is_one:
                given = self._method.reported(report.request_id, time, metric)
            else:
                given = self._method.reported_several(report.request_id, time, losses)
            given = self._take_operations(given)
        return given + self._settle()

    def _losses(self, report: messages.Reported) -> tuple[float, ...]:
        values = (report.metric, *report.others)
        if len(values) != len(names := self._config.metrics):
            raise ValueError(
                f"A report must have a value for each of {', '.join(names)}, but got {values}.\n"
                "Hint: report all objectives of a search together."
            )
        return self._config.signed([*map(float, values)])

    def _note_best(self, metric: float) -> None:
        best, is_smaller = self.budget.best, self._config.smaller_is_better
        if math.isfinite(metric) and (best is None or (metric < best) is is_smaller):
            self.budget.best = metric

    def _note_progress(self, told: messages.Progressed) -> list[messages.Operation]:
        trial = self._find(told.request_id)
        if trial.exit_reason is None:
            is_number = math.isfinite(told.progress)
            progress = min(max(float(told.progress), 0.0), 1.0) if is_number else 0.0
            self._set_progress(told.request_id, trial, progress)
        return []

    def _set_progress(self, request_id: str, trial: SearchedTrial, progress: float) -> None:
        trial.progress = max(progress, trial.reached)
        self._open_progress[request_id] = trial.progress

    def _exit(self, exit: messages.Exited) -> list[messages.Operation]:
        trial = self._find(exit.request_id)
        if trial.exit_reason is not None:
            return []
        # A stopped trial counts as done, however it ended: the search asked it to stop.
        trial.exit_reason = messages.ExitReason.COMPLETED if trial.is_stopped else exit.reason
        self._num_exited[trial.exit_reason] += 1
        trial.is_out_of_memory = (
            exit.is_out_of_memory and trial.exit_reason is messages.ExitReason.ERROR
        )
        del self._open_progress[exit.request_id]
        self.budget.num_failed += trial.exit_reason is messages.ExitReason.ERROR
        self.budget.num_trials -= trial.exit_reason is messages.ExitReason.INVALID_HP
        with self._guard("exited"):
            is_stopped = trial.is_stopped and not trial.is_cut
            operations = self._take_operations(
                self._method.exited(exit.request_id, trial.exit_reason, is_stopped)
            )
        return operations + self._settle()

    def _limit(self, given: messages.Limited) -> list[messages.Operation]:
        before, self.budget.limits = self.budget.limits.max_trials, given
        if given.best is not None:
            self._note_best(given.best)
        if not self._is_started:
            return []
        operations: list[messages.Operation] = []
        if given.max_trials != before:
            operations = self._resize(given.max_trials or self._num_planned)
            if (most := self.num_trials()) < (given.max_trials or 0):
                raise ValueError(
                    f"`max_trials` must be at most {most}, as the search method"
                    f" `{self._config.kind}` has no more trials, but got {given.max_trials}.\n"
                    "Hint: fork the experiment with another method."
                )
        return operations + self._settle()

    def _resize(self, max_trials: int) -> list[messages.Operation]:
        with self._guard("resize"):
            return self._take_operations(self._method.resize(max_trials))

    def _recall(self, given: messages.Recalled) -> list[messages.Operation]:
        sign = 1 if self._config.smaller_is_better else -1
        self._observations.recall(given, self.space, sign)
        return []

    def _spend(self, spent: messages.Spent) -> list[messages.Operation]:
        budget = self.budget
        if math.isfinite(spent.wall_s) and math.isfinite(spent.slot_s):
            budget.wall_s = max(budget.wall_s, spent.wall_s)
            budget.slot_s = max(budget.slot_s, spent.slot_s)
        return self._settle() if self._is_started else []

    @property
    def reached_limit(self) -> str | None:
        """Return the limit now ending the search or holding back new trials; None without any."""
        found = self.budget.reached(self._config.smaller_is_better)
        return found or ("max_trials" if self._held else None)

    def _settle(self) -> list[messages.Operation]:
        """Stop the trials if a limit is reached, and create those for which there is room."""
        operations: list[messages.Operation] = []
        if self.budget.reached(self._config.smaller_is_better) is not None:
            # What waits for hyperparameters does not exist yet: it comes once there is room again.
            for request_id, (create, later) in self._asks.items():
                self._held[request_id] = [create, *later]
                del self._trials[request_id], self._open_progress[request_id]
                self.budget.num_trials -= 1
            self._asks.clear()
            for request_id in self._open_progress:
                if not (trial := self._trials[request_id]).is_stopped:
                    trial.is_stopped = trial.is_cut = True
                    operations.append(messages.Stop(request_id=request_id))
        while self._held and self._has_room():
            released = self._held.pop(next(iter(self._held)))
            operations += self._take_operations(released, is_released=True)
        is_over = sum(self._num_exited.values()) == len(self._trials)
        if is_over and not self._is_over:
            operations.append(self._shutdown())
        self._is_over = is_over
        return operations

    def stopping_limit(self, request_id: str) -> str | None:
        """Return the limit behind a trial's stop; None if stopped by the method, or not at all."""
        return self.reached_limit if self._find(request_id).is_cut else None

    def _has_room(self) -> bool:
        return (
            self.budget.has_room() and self.budget.reached(self._config.smaller_is_better) is None
        )

    def _counted(self) -> dict[str, int]:
        num_invalid = self._num_exited[messages.ExitReason.INVALID_HP]
        return {
            "num_trials": len(self._trials) - num_invalid,
            "num_failed": self._num_exited[messages.ExitReason.ERROR],
        }

    def _propose(self, proposed: messages.Proposed) -> list[messages.Operation]:
        if proposed.request_id not in self._held:
            self._find(proposed.request_id)
        held = self._asks.get(proposed.request_id)
        # A search that asks nobody is given proposals as well, and holds up no trial for them.
        hparams = None
        if proposed.hparams is not None and (held is not None or not self._is_asking):
            hparams = self.space.check(proposed.hparams)
            self._method.proposed(proposed.request_id, hparams)
        if held is None:
            return []
        create, later = held
        if hparams is not None:
            create = msgspec.structs.replace(create, hparams=hparams)
        del self._asks[create.request_id]
        self._observations.add(create.request_id, create.hparams, proposed.note)
        return [create, *later]

    def _shutdown(self) -> messages.Shutdown:
        # Invalid hyperparameters count for nothing, also not against an otherwise failed search;
        # a search with nothing else has failed.
        counted = len(self._trials) - self._num_exited[messages.ExitReason.INVALID_HP]
        is_limit = self.budget.reached(self._config.smaller_is_better) == "max_failures"
        return messages.Shutdown(
            failure=is_limit or counted == self._num_exited[messages.ExitReason.ERROR],
            cancel=0 < counted == self._num_exited[messages.ExitReason.CANCELED],
        )

    def _take_operations(
        self, operations: list[messages.Operation], *, is_released: bool = False
    ) -> list[messages.Operation]:
        passing: list[messages.Operation] = []
        for operation in operations:
            if isinstance(operation, messages.Create):
                if not is_released and (self._held or not self._has_room()):
                    self._held[operation.request_id] = [operation]
                    continue
                self._trials[operation.request_id] = SearchedTrial()
                self._open_progress[operation.request_id] = 0.0
                self.budget.num_trials += 1
                passing.append(operation)
                continue
            if not isinstance(operation, (messages.Train, messages.Stop)):
                raise TypeError(f"it must return Create, Train and Stop, but got {operation!r}")
            if isinstance(operation, messages.Train) and (
                type(operation.length) is not int or operation.length < 1
            ):
                raise ValueError(f"`length` of {operation!r} must be an integer of at least 1")
            if operation.request_id in self._held:
                self._held[operation.request_id].append(operation)
                continue
            if operation.request_id not in self._trials:
                raise ValueError(f"{operation!r} must be about a trial that it created")
            if isinstance(operation, messages.Stop):
                trial = self._trials[operation.request_id]
                if trial.is_cut:
                    # The method knew nothing of the first stop.
                    trial.is_cut = False
                    continue
                trial.is_stopped = True
            passing.append(operation)
        return self._hold(passing) if self._is_asking else passing

    def _hold(self, operations: list[messages.Operation]) -> list[messages.Operation]:
        """Keep the operations on trials without hyperparameters so far; return the others."""
        passing: list[messages.Operation] = []
        for operation in operations:
            if isinstance(operation, messages.Create) and operation.parent is None:
                self._asks[operation.request_id] = operation, []
            elif (
                isinstance(operation, messages.Train | messages.Stop)
                and operation.request_id in self._asks
            ):
                self._asks[operation.request_id][1].append(operation)
            else:
                passing.append(operation)
        return passing

    def _find(self, request_id: str) -> SearchedTrial:
        trial = self._trials.get(request_id)
        if trial is None:
            raise ValueError(
                f"`request_id` must name a trial that the search created, but got {request_id!r}.\n"
                "Hint: give `Started` first, and the inputs in the order in which they came."
            )
        return trial


def replay(
    config: base.SearchConfig,
    hyperparameters: dict[str, Any],
    seed: int,
    inputs: Iterable[messages.Input],
    *,
    is_asking: bool = False,
) -> list[list[messages.Operation]]:
    """Return the operations following each of the stored inputs.

    Raises:
        ValueError: If the configuration is not valid or the inputs do not belong to a search.
    """
    search = Search(config, hyperparameters, seed, is_asking=is_asking)
    return [search.apply(input) for input in inputs]
