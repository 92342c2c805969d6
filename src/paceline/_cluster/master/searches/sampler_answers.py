"""Answers of samplers to the searches of a master: each search has a thread and a process.

The sampler `external` has no process: programs elsewhere read the open asks over the API and
answer them, and what nobody answers in time is drawn at random.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.searches.search_operations import takes_inputs
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.reach import check_object
from paceline._cluster.master.store.row_ids_and_counts import update_experiment
from paceline._cluster.master.waiting import WaitingRequests
from paceline._cluster.messages.search_and_metric_models import (
    SearchAsk,
    SearchAsks,
    SearchObjective,
    SearchObservation,
)
from paceline._cluster.messages.states import ExperimentState
from paceline.config._searcher_section import EXTERNAL, Searcher
from paceline.search._hyperparameter_space import Space
from paceline.search._sampler_program import SamplerProgram
from paceline.search._samplers import (
    Ask,
    Observation,
    Proposal,
    SamplerError,
    SamplerSpec,
    answers_to,
    num_asked,
)
from paceline.search._search_messages import Create, Proposed, Recalled

logger = logging.getLogger(__name__)

# So many trials are proposed at once.
_MOST = 32
# Other writes wait meanwhile.
_MOST_STORING_S = 0.05
# A sampler without questions for so many seconds gives its memory back.
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Question:
    row: sa.Row[Any]
    space: Space
    asks: Sequence[Create]
    observations: Sequence[Observation]


@dataclass(slots=True)
class _Served:
    is_asked: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    program: SamplerProgram | None = None
    # When each open ask of an external sampler was first seen, and how long the next may wait.
    seen_at: dict[str, float] = field(default_factory=dict)
    wait_s: float = _IDLE_S
    last_fault: str = ""


class SamplerAnswers:
    """Have samplers answer the asks of searches, outside the writer thread; store the answers.

    Args:
        database: The database.
        changes: Stores the answers as inputs of their searches.
    """

    def __init__(self, database: Database, changes: StateChanges) -> None:
        self._database = database
        self._changes = changes
        self._served: dict[int, _Served] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self.waiting = WaitingRequests()
        """Requests that wait for asks, by experiment."""
        changes.searches.on_asks = self.ask
        changes.searches.on_state = self._note_state

    def start(self) -> None:
        """Go on with the searches of an earlier master."""
        experiments = tables.experiments
        live = experiments.c.ended_at.is_(None), experiments.c.external_id.is_(None)
        with self._database.read() as connection:
            rows = connection.execute(sa.select(experiments).where(*live)).all()
        for row in rows:
            if config_of(row).searcher.is_asking:
                self.ask(row.id)

    def ask(self, experiment_id: int) -> None:
        """Have the open asks of a search answered; from any thread."""
        with self._lock:
            if self._is_closing:
                return
            served = self._served.setdefault(experiment_id, _Served())
            served.is_asked.set()
            self.waiting.notify(experiment_id)
            if served.thread is None:
                served.thread = threading.Thread(
                    target=self._serve,
                    args=(experiment_id, served),
                    name=f"paceline-sampler-{experiment_id}",
                    daemon=True,
                )
                served.thread.start()

    def _note_state(self, experiment_id: int) -> None:
        # Nobody waits for the asks of a search that has ended, and a pause takes no time.
        self.waiting.notify(experiment_id)
        with self._lock:
            if (served := self._served.get(experiment_id)) is not None:
                served.is_asked.set()

    def close(self) -> None:
        """End the threads and processes; answers under way are given up."""
        with self._lock:
            self._is_closing = True
            served = list(self._served.values())
        for one in served:
            one.is_asked.set()
            if one.program is not None:
                one.program.close()
        for one in served:
            if one.thread is not None:
                one.thread.join()

    def _serve(self, experiment_id: int, served: _Served) -> None:
        try:
            while self._goes_on(experiment_id, served):
                while self._answer(experiment_id, served):
                    pass
        except Exception:
            if not self._is_closing:
                logger.exception("The sampler of experiment %d gets no questions.", experiment_id)
            with self._lock:
                self._served.pop(experiment_id, None)
        finally:
            if served.program is not None:
                served.program.close()

    def _goes_on(self, experiment_id: int, served: _Served) -> bool:
        """Wait for a question; False if there is none for long, or the master ends."""
        is_asked = served.is_asked.wait(served.wait_s)
        with self._lock:
            if (is_asked or served.seen_at) and not self._is_closing:
                served.is_asked.clear()
                return True
            self._served.pop(experiment_id, None)
            return False

    def _answer(self, experiment_id: int, served: _Served) -> bool:
        """Answer some of the open asks; False if there are none."""
        found = self._database.write(lambda t: self._question(t, experiment_id)).result()
        if found is None:
            served.seen_at.clear()
            served.wait_s = _IDLE_S
            return False
        config = config_of(found.row)
        spec = config.searcher.sampler_spec()
        asks = found.asks
        ask: Ask | None = None
        if spec.name == EXTERNAL:
            ask = _late(spec)
            points = config.searcher.points_to_evaluate
            asks = _overdue(
                found, served, spec, max(0, len(points) - num_asked(found.observations))
            )
            if not asks:
                return False
        elif spec.name != "random":
            if served.program is None:
                served.program = SamplerProgram(spec, config.hyperparameters, found.row.seed)
            ask = served.program
        answers = answers_to(
            found.space,
            asks,
            found.observations,
            ask,
            spec.shown,
            config.searcher.points_to_evaluate,
        )
        if self._is_closing:
            return False
        for why in {one.why for one in answers if one.is_fallback} - {served.last_fault}:
            logger.warning("Experiment %d draws at random: %s", experiment_id, why)
            served.last_fault = why
        while answers:
            num_stored = self._database.write(
                lambda t, left=answers: self._store(t, experiment_id, left)  # type: ignore[misc]
            ).result()
            answers = answers[num_stored:]
        return True

    def _question(self, transaction: Transaction, experiment_id: int) -> _Question | None:
        experiments = tables.experiments
        query = sa.select(experiments).where(experiments.c.id == experiment_id)
        row = transaction.connection.execute(query).first()
        if row is None or not takes_inputs(row):
            return None
        search = self._changes.searches.peek(transaction, experiment_id)
        if search is None or not search.num_asks:
            return None
        most = None if config_of(row).searcher.sampler_name == EXTERNAL else _MOST
        return _Question(row, search.space, search.asks[:most], search.observations())

    def open_asks(self, experiment_id: int) -> SearchAsks:
        """Return the open asks of an experiment's search, and the observations for a sampler.

        Raises:
            NotFoundError: There is no such experiment.
        """

        def read(transaction: Transaction) -> tuple[Searcher, _Question | None]:
            row = self._changes.experiment(transaction.connection, experiment_id)
            return config_of(row).searcher, self._question(transaction, experiment_id)

        searcher, found = self._database.write(read).result()
        asks = SearchAsks(
            metric=searcher.metric,
            smaller_is_better=searcher.smaller_is_better,
            objectives=[SearchObjective(**one.model_dump()) for one in searcher.objectives],
        )
        if found is None:
            return asks
        # Outside the writer thread, as there may be many trials.
        told = [msgspec.structs.asdict(one) for one in found.observations]
        values = {
            "asks": [SearchAsk(id=one.request_id, hparams=one.hparams) for one in found.asks],
            "parameters": [{"name": one.name, **asdict(one)} for one in found.space.parameters],
            "observations": [SearchObservation(**one) for one in told],
        }
        return asks.model_copy(update=values)

    def _store(
        self, transaction: Transaction, experiment_id: int, answers: Sequence[Proposed]
    ) -> int:
        """Store answers, at least one and for `_MOST_STORING_S`; return how many are done."""
        found = sa.select(tables.experiments).where(tables.experiments.c.id == experiment_id)
        row = transaction.connection.execute(found).first()
        # The experiment may have ended, and gone, meanwhile.
        if row is None or not takes_inputs(row):
            return len(answers)
        search = self._changes.searches.peek(transaction, experiment_id)
        begun = time.monotonic()
        for number, answer in enumerate(answers):
            if number and time.monotonic() - begun > _MOST_STORING_S:
                return number
            # A proposal of a person may have been faster.
            if search is not None and search.ask_of(answer.request_id) is not None:
                self._changes.search_operations.apply_input(transaction, experiment_id, answer)
        return len(answers)


def _overdue(
    found: _Question, served: _Served, spec: SamplerSpec, num_points: int
) -> Sequence[Create]:
    """Return asks that have waited for too long, or are for points that the config names.

    Others wait for the writer thread meanwhile, so there are not too many at once.
    """
    now = time.monotonic()
    is_paused = found.row.state == ExperimentState.PAUSED.value
    before = {} if is_paused else served.seen_at
    ids = [each.request_id for each in found.asks]
    served.seen_at = {one: min(before.get(one, now), now) for one in ids}
    due = min(served.seen_at.values()) + spec.timeout_s
    served.wait_s = max(0.0, due - now) + 0.01
    if is_paused:
        # Time counts from the end of the pause on.
        served.seen_at, served.wait_s = dict.fromkeys(ids, math.inf), _IDLE_S
    if num_points:
        return found.asks[: min(num_points, _MOST)]
    late = (a for a in found.asks if served.seen_at[a.request_id] + spec.timeout_s <= now)
    return list(itertools.islice(late, _MOST))


def _late(spec: SamplerSpec) -> Ask:
    def ask(observations: Sequence[Observation], n: int) -> Sequence[Proposal]:
        raise SamplerError(f"no program has answered over the API within {spec.timeout_s:g} s")

    return ask


def recall_trials(
    transaction: Transaction, changes: StateChanges, experiment_id: int, source_id: int | str
) -> None:
    """Tell a new search the ended trials of another, and warn of trials outside its space."""
    connection = transaction.connection
    if not isinstance(source_id, int):
        raise RefusedError(
            "no_such_source",
            "`searcher.warm_start_from` must name experiments by their ids, but got"
            f" {source_id!r}. Hint: `train.search` and `Study` take CSV files.",
        )
    check_object(connection, "experiment_id", source_id)
    row = changes.experiment(connection, experiment_id)
    wanted = config_of(row).searcher
    searched = config_of(changes.experiment(connection, source_id)).searcher
    aims = [(one.metric, one.smaller_is_better) for one in (wanted, searched)]
    if aims[0] != aims[1]:
        raise RefusedError(
            "other_metric",
            f"Experiment {source_id} must search for the metric {wanted.metric!r} in the same"
            f" direction to be learned from, but searches for {searched.metric!r}.",
        )
    trials = tables.trials.c
    query = sa.select(trials.hparams, trials.best_metric, trials.best_step).where(
        trials.experiment_id == source_id,
        trials.ended_at.is_not(None),
        trials.best_metric.is_not(None),
    )
    given = [
        (one.hparams, one.best_metric, float(one.best_step or 0))
        for one in connection.execute(query.order_by(trials.id))
    ]
    search = changes.searches.peek(transaction, experiment_id)
    before = 0 if search is None else len(search.observations())
    recalled = Recalled(source=f"experiment {source_id}", trials=given)
    changes.search_operations.apply_input(transaction, experiment_id, recalled)
    taken = 0 if search is None else len(search.observations()) - before
    told = f"The sampler learns from {taken} of {len(given)} ended trials of experiment"
    told += f" {source_id}" + ("." if taken else ", as none has values of this space.")
    update_experiment(connection, experiment_id, warnings=[*row.warnings, told])
